"""The event file survives kills and resumes, and its history counts each step once."""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.records.events import EventLog, read_events
from rowstead.spec.errors import RowsteadError


def steps(path: Path, kind: str = "train") -> list[int]:
    return [event["step"] for event in read_events(path) if event["kind"] == kind]


def test_an_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.write("train", 10, loss=0.5, ne=float("nan"))
    event = json.loads(log.path.read_text())
    assert event.pop("time_s") > 1e9
    assert event == {"kind": "train", "step": 10, "loss": 0.5}
    log.close()
    log.close()


def test_a_resume_supersedes_later_steps_and_keeps_them_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path)) as log:
        for step in (10, 20, 30):
            log.write("train", step, loss=1.0)
    with closing(EventLog(path)) as log:
        log.resumed(20)
        log.write("train", 30, loss=2.0)
    assert [(e["kind"], e["step"], e.get("loss")) for e in read_events(path)] == [
        ("train", 10, 1.0),
        ("train", 20, 1.0),
        ("resumed", 20, None),
        ("train", 30, 2.0),
    ]
    assert path.read_text().count('"train"') == 4


@given(cut=st.integers(0, 400))
@settings(deadline=None)
def test_wherever_a_kill_tears_the_file_whole_lines_before_and_after_count(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    with closing(EventLog(path)) as log:
        for step in range(1, 6):
            log.write("train", step, text="é" * 5)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    # A cut right before a newline leaves a whole event.
    whole = [json.loads(line)["step"] for line in content.split(b"\n") if line.endswith(b"}")]
    assert steps(path) == whole
    with closing(EventLog(path)) as log:
        log.write("train", 99)
    assert steps(path) == [*whole, 99]


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path)) as log:
        threads = [
            threading.Thread(target=lambda k=k: [log.write("train", k, text="x" * 200) for _ in range(50)]) for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(steps(path)) == sorted(list(range(4)) * 50)


def test_a_file_that_cannot_be_used_is_an_error_without_traceback(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match="cannot read events"):
        read_events(tmp_path / "none.jsonl")
    with pytest.raises(RowsteadError, match="cannot write events"):
        EventLog(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_without_traceback(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "events.jsonl")) as log, open("/dev/full", "r+b", buffering=0) as full:
        os.dup2(full.fileno(), log._descriptor)  # a log opens only plain files
        with pytest.raises(RowsteadError, match="No space left"):
            log.write("train", 1)
