"""docs/tutorial.md does what it says: its script and its commands, in their order, print what the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.commands import Command

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def measures(text: str) -> list[float]:
    """NE, log loss, AUC and calibration of the last evaluation."""
    (*_, line) = re.findall(r"^step \d+: (NE .*)$", text, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "128")
    script, *_ = (text for language, text in BLOCK.findall(PAGE) if language == "python")
    Path("make_log.py").write_text(script)
    subprocess.run([sys.executable, "make_log.py"], check=True)
    assert Path("log/date=2026-10-01/clicks.csv").read_text().splitlines()[1] in PAGE
    num_trained = 0
    for language, text in BLOCK.findall(PAGE):
        for shown in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if language == "console" else ():
            line, _, output = shown.partition("\n")
            command, *arguments = shlex.split(line)
            assert command == "rowstead"
            done = rowstead(*arguments)
            assert done.code == 0, done.text
            if arguments[0] == "init":
                assert [row.rstrip() for row in done.out.strip().splitlines()] == output.strip().splitlines()
                recipe = Path("recipe.yaml").read_text()
                assert "      tags: string\n" in recipe
                recipe = re.sub(r"\n.*name: date_weekday.*", "", recipe.replace("tags: string", "tags: list<string>"))
                Path("recipe.yaml").write_text(recipe)
            if arguments[0] == "train":
                num_trained += 1
                assert measures(done.out) == pytest.approx(measures(output), abs=0.01)
            if arguments[0] == "predict":
                assert output.strip() in done.out
    assert num_trained == 2
    shown_rows = re.findall(r"'p': ([\d.]+), 'user_id': (\d+)", PAGE)
    rows = pq.read_table("scores.parquet").slice(0, len(shown_rows)).to_pylist()
    assert [(row["p"], row["user_id"]) for row in rows] == [
        (pytest.approx(float(p), abs=0.03), int(user)) for p, user in shown_rows
    ]
    assert rowstead("report", "--out", "report.html").code == 0
