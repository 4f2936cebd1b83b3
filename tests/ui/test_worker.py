"""Work for the page happens in other processes: whatever it does, the server answers, and within bounds."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import RowsteadError
from rowstead.spec.record import Record
from rowstead.spec.run import load_recipe
from rowstead.ui.browse import Reports, files_state
from rowstead.ui.server import Ui
from rowstead.ui.worker import BusyError, Workers
from tests.spec.test_hostile_recipes import BOMB
from tests.ui.test_server import ask, post

ODD = "tests.ui.odd_jobs"


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Ui]:
    page = Ui(runs=tmp_path, workers=Workers(ODD, 1))
    page.start()
    yield page
    page.close()


def lines_of(ui: Ui, scenario: Any) -> list[Any]:
    status, data = post(ui, "/api/plan", {"scenario": scenario})
    assert status == 200
    return [json.loads(line) for line in data.splitlines()]


def test_what_goes_wrong_half_way_ends_the_answer_with_the_reason(odd: Ui) -> None:
    assert lines_of(odd, "half")[1:] == [{"error": "no more of it"}]


def test_our_own_mistakes_are_answered_and_told_on_the_terminal(odd: Ui, capfd: pytest.CaptureFixture[str]) -> None:
    assert "terminal" in lines_of(odd, "wrong")[1]["error"]
    assert "ZeroDivisionError: oh" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "says"),
    [("endless", "took longer than"), ("memory", "took more than"), ("killed", "was killed: try again")],
)
def test_a_job_without_end_is_stopped_while_others_are_answered(odd: Ui, how: str, says: str) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(lines_of, odd, how)
        assert ask(odd, "GET", "/")[0] == 200
        assert ask(odd, "GET", "/api/runs")[0] == 200
        assert says in answer.result(timeout=60)[-1]["error"]
    assert lines_of(odd, "fine")[1] == {"number": 0}  # by a new process


def test_a_job_that_nobody_waits_for_any_more_is_left_and_its_process_taken_again() -> None:
    workers = Workers(ODD, 1)
    with contextlib.closing(workers):
        with contextlib.closing(workers.run("plan", scenario="long")) as job:
            first = next(job)
        assert next(workers.run("plan", scenario="fine"))["pid"] == first["pid"]


def test_a_job_that_finds_no_free_process_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowstead.ui.worker.QUEUE_S", 0.05)
    workers = Workers(ODD, 1)
    with contextlib.closing(workers), contextlib.closing(workers.run("plan", scenario="fine")) as job:
        next(job)
        with pytest.raises(BusyError, match="try again"):
            next(workers.run("plan", scenario="fine"))


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    root = tmp_path_factory.mktemp("runs")
    for _ in range(3):
        folder = RunFolder.create(root, "quickstart")
        folder.write_spec(load_recipe("quickstart"))
        folder.write_record(record(5e4))
    page = Ui(runs=root)
    page.start()
    yield page
    page.close()


def record(samples_per_s: float) -> Record:
    figures = {"samples_per_s": samples_per_s}
    return Record(kind="measured", name="quickstart", spec_digest="d", date="2026-11-15T12:00:00+00:00", figures=figures)


def test_an_alias_bomb_is_refused_while_other_requests_are_answered(ui: Ui) -> None:
    started = time.process_time()
    with ThreadPoolExecutor() as pool:
        bombs = [pool.submit(post, ui, "/api/recipe", {"text": BOMB}) for _ in range(4)]
        assert ask(ui, "GET", "/")[0] == 200
        for bomb in bombs:
            status, data = bomb.result(timeout=60)
            assert status == 400
            assert "more than 500,000 values" in json.loads(data)["error"]
    assert time.process_time() - started < 1  # of the server itself


def test_a_recipe_in_a_request_is_bounded_like_one_in_a_file(ui: Ui) -> None:
    features = {"dense": [{"name": "x{i}", "repeat": "1e12"}]}
    status, data = post(ui, "/api/plan", {"scenario": {}, "base": {"name": "x", "data": {"synth": {}}, "features": features}})
    assert status == 400
    assert "features.dense[0].repeat: must be at most 50,000" in json.loads(data)["error"]


def test_200_requests_at_once_are_answered(ui: Ui) -> None:
    paths = ["/report", *(f"/report/quickstart-{number:03}" for number in (1, 2, 3)), "/api/runs"]

    def get(number: int) -> tuple[int, int]:
        connection = http.client.HTTPConnection("127.0.0.1", ui.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", paths[number % len(paths)])
            answer = connection.getresponse()
            return answer.status, len(answer.read())

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(get, range(200)))
    assert [status for status, _ in answers] == [200] * 200
    assert all(size > 100 for _, size in answers)


class CountingWorkers:
    """Counts the reports that are drawn."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def run(self, job: str, *, path: str) -> Iterator[str]:
        self.num_drawn += 1
        assert self.may_end.wait(60)
        yield f"{job} {self.num_drawn} of {path}"


def test_a_report_is_drawn_once_until_a_file_that_it_depends_on_changes(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "quickstart")
    folder.write_spec(load_recipe("quickstart"))
    workers = CountingWorkers()
    reports = Reports(workers)  # type: ignore[arg-type]
    assert reports.page(tmp_path) == reports.page(tmp_path) == f"report 1 of {tmp_path}".encode()
    folder.write_record(record(1.0))
    assert reports.page(tmp_path) == f"report 2 of {tmp_path}".encode()
    folder.events_file.write_text("{}\n")
    assert reports.page(tmp_path) == f"report 3 of {tmp_path}".encode()
    (folder.checkpoints / "step-1").mkdir(parents=True)
    (folder.checkpoints / "step-1" / "x").touch()  # no report reads it
    assert reports.page(tmp_path) == f"report 3 of {tmp_path}".encode()


def test_requests_for_one_report_wait_for_one_drawing(tmp_path: Path) -> None:
    workers = CountingWorkers()
    workers.may_end.clear()
    reports = Reports(workers)  # type: ignore[arg-type]
    with ThreadPoolExecutor(20) as pool:
        pages = [pool.submit(reports.page, tmp_path) for _ in range(20)]
        (tmp_path / "records.jsonl").write_text("")  # changes while it is drawn
        workers.may_end.set()
        assert len({page.result(timeout=60) for page in pages}) <= 2
    assert workers.num_drawn <= 2


def test_reports_that_fail_are_drawn_again(tmp_path: Path) -> None:
    class Failing(CountingWorkers):
        def run(self, job: str, *, path: str) -> Iterator[str]:
            if self.num_drawn == 0:
                self.num_drawn = 1
                raise RowsteadError("not now")
            yield "fine"

    reports = Reports(Failing())  # type: ignore[arg-type]
    with pytest.raises(RowsteadError, match="not now"):
        reports.page(tmp_path)
    assert reports.page(tmp_path) == b"fine"
    assert files_state(tmp_path / "missing") == files_state(tmp_path)
