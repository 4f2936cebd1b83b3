"""Searches are drawn with the best so far, quality studies with confidence intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rowstead.records.store import StoreEntry
from rowstead.report import charts_searches
from tests.report.made_records import entry


def trial(number: int, objective: float, speed: float = 10.0, **options: Any) -> StoreEntry:
    figures = {"objective": objective, "trial_number": float(number), "samples_per_s": speed}
    return entry(source="trial", study="t", axes={"lr": number}, figures=figures, **options)


def test_a_search_is_drawn_with_its_best_so_far_and_its_pareto_front() -> None:
    trials = [trial(0, 0.9), trial(1, 0.7, 5.0), trial(2, 0.8, 20.0), trial(3, 0.1, failure="pruned at step 10")]
    history, front = charts_searches.draw_search("t", trials, [])
    assert history.traces[0]["y"] == [0.9, 0.7, 0.8]
    assert history.traces[1]["y"] == [0.9, 0.7, 0.7]
    assert "1 pruned, failed or too slow, not drawn" in history.words
    assert (front.traces[0]["x"], front.traces[1]["x"]) == ([10.0], [5.0, 20.0])
    assert charts_searches.draw_search("t", trials[3:], []) == []


def test_trials_below_the_required_speed_are_not_the_best(tmp_path: Path) -> None:
    trials = [trial(0, 0.9), trial(1, 0.7, 5.0), trial(2, 0.8, 20.0)]
    (tmp_path / "studies" / "t").mkdir(parents=True)
    (tmp_path / "studies" / "t" / "tune.yaml").write_text("samples_per_s: 8\n")
    (tmp_path / "records.jsonl").write_text("")
    for path in (tmp_path, tmp_path / "records.jsonl"):
        history = charts_searches.draw_search("t", trials, [str(path)])[0]
        assert history.traces[1]["y"] == [0.9, 0.8]
        assert "1 pruned, failed or too slow, not drawn" in history.words


def test_effects_are_drawn_with_intervals_and_the_tolerance() -> None:
    base = {1: 0.7, 2: 0.72, 3: 0.71}
    entries = [
        entry(source="quality", seed=seed, axes={"axis": "baseline", "value": None}, figures={"ne": ne})
        for seed, ne in base.items()
    ]
    for value, factor in ((4096, 1.01), (8192, 1.0)):
        axes = {"axis": "batch size", "value": value}
        entries += [
            entry(source="quality", seed=seed, axes=axes, figures={"ne": ne * factor + seed * 1e-6})
            for seed, ne in base.items()
        ]
    figure = charts_searches.draw_effects("q", entries)
    assert figure is not None
    assert figure.traces[0]["x"] == pytest.approx([1.0, 0.0], abs=0.01)
    assert figure.traces[0]["marker"]["color"] == ["@bad", "@good"]
    assert figure.layout["shapes"][0]["x0"] == pytest.approx(0.1)
    assert all(0 < half < 0.01 for half in figure.traces[0]["error_x"]["array"])


def test_importance_is_read_only_from_next_to_the_store(tmp_path: Path) -> None:
    (tmp_path / "studies" / "t").mkdir(parents=True)
    (tmp_path / "studies" / "t" / "importance.json").write_text(json.dumps({"lr": 0.75, "eps": 0.25, "bad": "x"}))
    assert charts_searches.read_importance("t", [str(tmp_path)]) == {"lr": 0.75, "eps": 0.25}
    (tmp_path / "importance.json").write_text(json.dumps({"lr": 1.0}))
    assert charts_searches.read_importance("..", [str(tmp_path)]) == {}
    assert charts_searches.read_importance("../t", [str(tmp_path)]) == {}
