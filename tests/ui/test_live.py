"""Runs under way are followed through their event files."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from rowstead.records.events import EventLog
from rowstead.records.run_folder import RunFolder
from rowstead.spec.run import load_recipe
from rowstead.ui.live import MAX_POINTS, LiveRuns, roles_of


def test_only_runs_that_train_are_followed_and_only_what_is_new_is_read(tmp_path: Path) -> None:
    live, folder = LiveRuns(tmp_path), RunFolder.create(tmp_path, "small")
    folder.write_spec(load_recipe("quickstart"))
    assert live.listing() == []
    with folder.lock(), closing(EventLog(folder.events_file)) as events:
        assert live.listing() == [{"name": "small-001", "points": [], "evaluation": None}]
        events.write("train", step=10, loss=0.5)
        events.write("train", step=20, loss=0.4)
        events.write("evaluation", step=20, ne=0.8)
        (run,) = live.listing()
        assert run["points"] == [{"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.4}]
        assert run["evaluation"] == {"step": 20, "ne": 0.8}
        with folder.events_file.open("ab") as file:  # half a line, and the rest of it later
            file.write(b'{"kind": "train", "step": 3')
            file.flush()
            assert len(live.listing()[0]["points"]) == 2
            file.write(b'0, "loss": 0.3}\nno JSON\n')
        assert [point["step"] for point in live.listing()[0]["points"]] == [10, 20, 30]
        events.resumed(20)
        assert [point["step"] for point in live.listing()[0]["points"]] == [10, 20]
        for step in range(30, 30 + 10 * MAX_POINTS, 10):
            events.write("train", step=step, loss=0.3)
        points = live.listing()[0]["points"]
        assert len(points) <= MAX_POINTS
        assert (points[0]["step"], points[-1]["step"]) == (10, 20 + 10 * MAX_POINTS)
    assert live.listing() == []


def test_roles_of_a_fleet_are_shown_from_their_last_two_samples(tmp_path: Path) -> None:
    live, folder = LiveRuns(tmp_path), RunFolder.create(tmp_path, "small")
    folder.write_spec(load_recipe("quickstart"))
    (folder.path / "roles").mkdir()
    for name, last_s in (("trainer-10", 20.0), ("trainer-2", 20.0), ("sparse-0", 2.0)):
        lines = [
            {"time_s": last_s - 2 + step, "incarnation": 0, "cpu_s": 1.5 * step, "rss_bytes": 1e6, "num_samples": 500 * step}
            for step in (0, 2)
        ]
        (folder.path / "roles" / f"{name}.jsonl").write_text(
            "x\n" * 20_000 + "".join(json.dumps(line) + "\n" for line in lines) + '{"time_s"'
        )
    (folder.path / "roles" / "reader-0.jsonl").write_text("[]\n")
    assert roles_of(folder, now_s=21.0) == [
        {"name": "sparse-0", "is_silent": True, "rss_bytes": 1e6, "cores": 1.5, "samples_per_s": 500.0},
        {"name": "trainer-2", "is_silent": False, "rss_bytes": 1e6, "cores": 1.5, "samples_per_s": 500.0},
        {"name": "trainer-10", "is_silent": False, "rss_bytes": 1e6, "cores": 1.5, "samples_per_s": 500.0},
    ]
    with folder.lock():
        (run,) = live.listing()
        assert [role["name"] for role in run["roles"]] == ["sparse-0", "trainer-2", "trainer-10"]
