"""docs/tutorial_python.md runs as it stands, and prints what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import rowstead
from tests.small_runs import small_spec

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial_python.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|py|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TOLERANCE = 0.03
"""Of numbers with a fraction: processors round in other ways."""


def words_of(text: str) -> list[str | float]:
    """The words of an output, numbers with a fraction as such."""
    parts = re.split(r"(\d+\.\d+)|\s+", text)
    return [float(part) if re.fullmatch(r"\d+\.\d+", part) else part for part in parts if part]


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    printed, num_compared = "", 0
    for language, text in BLOCK.findall(PAGE):
        if language == "python":
            assert not printed, f"the page does not show what a block prints: {printed}"
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, "tutorial_python.md", "exec"), namespace)
            printed = out.getvalue()
        elif language == "text":
            found, said = words_of(printed), words_of(text)
            assert len(found) == len(said), printed
            for one, other in zip(found, said, strict=True):
                assert one == (pytest.approx(other, rel=TOLERANCE) if isinstance(other, float) else other), printed
            printed, num_compared = "", num_compared + 1
    assert num_compared >= 9


class Recorded(types.ModuleType):
    """A library that only keeps which of its functions were called with what."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> contextlib.AbstractContextManager[None]:
            self.calls.append((name, arguments, options))
            return contextlib.nullcontext()

        return call


@pytest.fixture
def small_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rowstead.RunSpec:
    monkeypatch.chdir(tmp_path)
    train = dataclasses.replace(small_spec().train, max_steps=6, eval_every=3)
    return dataclasses.replace(small_spec(), train=train)


def example(word: str) -> str:
    (text,) = [text for language, text in BLOCK.findall(PAGE) if language == "py" and f"import {word}\n" in text]
    return text


@pytest.mark.parametrize("library", ["mlflow", "wandb"])
def test_the_example_of_a_callback_logs_a_real_run(
    library: str, small_recipe: rowstead.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(library)
    monkeypatch.setitem(sys.modules, library, recorded)
    exec(compile(example(library), library, "exec"), {"rowstead": rowstead, "recipe": small_recipe})
    record = rowstead.train(small_recipe).record
    assert record is not None
    if library == "mlflow":
        assert [name for name, *_ in recorded.calls] == ["start_run", "log_params", "log_metrics", "log_metrics", "log_metrics"]
        assert recorded.calls[3][1][0]["ne"] == record.figures["ne"]
        assert recorded.calls[3][2] == {"step": 6}
        assert recorded.calls[4][1][0]["num_steps"] == 6
    else:
        assert [name for name, *_ in recorded.calls] == ["init", "log", "log", "finish"]
        assert recorded.calls[0][2]["config"] == small_recipe.to_dict()
        assert recorded.calls[2][1][0]["eval/ne"] == record.figures["ne"]
    assert all(
        isinstance(value, (int, float))
        for name, given, _ in recorded.calls
        if name == "log_metrics"
        for value in given[0].values()
    )
