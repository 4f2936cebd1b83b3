"""Runs that are asked to stop: by Ctrl-C, SIGTERM, or a terminal that is gone. They save, and end with the exit code of the signal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rowstead.cli.study import _stoppable
from rowstead.distributed.stop import stop_on_signal, stop_signals
from rowstead.report.terminal import terminal
from rowstead.run import resume, train
from rowstead.study.trial import run_trial
from rowstead.training.checkpoint import checkpoints_in
from tests.small_runs import RecordingCallback, assert_same_weights, recipe, small_spec, wait_until

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def no_nohup() -> Iterator[None]:
    """Tests that run under nohup ignore SIGHUP, and so would their runs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_saves_when_it_is_asked_to_stop_and_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    handlers = [signal.getsignal(one) for one in SIGNALS]
    stopped = train(small_spec(), root=tmp_path, callback=RecordingCallback(stop_after=40, by=number))
    assert (stopped.outcome.ending, stopped.stopped_by, stopped.record) == ("interrupted", number, None)
    assert [path.name for path in checkpoints_in(stopped.folder / "checkpoints")] == ["step-000000040"]
    assert [signal.getsignal(one) for one in SIGNALS] == handlers
    assert resume(str(stopped.folder)).stopped_by is None
    assert_same_weights(stopped.folder, train(small_spec(), root=tmp_path).folder)


def test_a_run_under_nohup_is_not_stopped_by_sighup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = train(small_spec(), root=tmp_path, callback=RecordingCallback(stop_after=40, by=signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (done.outcome.ending, done.outcome.position.step) == ("finished", 100)


def command(folder: Path, *arguments: object) -> list[str]:
    """A run that takes minutes unless it is stopped."""
    given = recipe(folder, epochs=2000, log_every=10)
    return [sys.executable, "-m", "rowstead", "train", str(given), "--out", str(folder / "out"), *map(str, arguments)]


def wait_for_steps(process: subprocess.Popen[str], out: Path) -> None:
    def has_steps() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return (out / "events.jsonl").is_file() and '"step"' in (out / "events.jsonl").read_text()

    wait_until(has_steps, what="the first steps")


def assert_saved(out: Path) -> None:
    assert len(checkpoints_in(out / "checkpoints")) == 1
    assert not (out / "record.json").exists()


def test_a_process_that_has_only_its_report_left_ignores_requests_to_stop() -> None:
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        with stop_on_signal(ignored_afterwards=True) as stop:
            pass
        for number in before:
            signal.raise_signal(number)
        assert not stop.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ((), signal.SIGTERM, 143),
        ((), signal.SIGHUP, 129),
        (("--processes", 2), signal.SIGHUP, 129),
        (("--fleet", "trainers=1,sparse=1,dense=0,readers=1"), signal.SIGTERM, 143),
    ],
    ids=str,
)
def test_a_command_that_was_stopped_saves_and_ends_with_the_code_of_the_signal(
    tmp_path: Path, how: tuple[object, ...], number: signal.Signals, code: int
) -> None:
    words = command(tmp_path, *how)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for_steps(process, tmp_path / "out")
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert "the checkpoint is saved" in said
    assert "Traceback" not in said
    assert_saved(tmp_path / "out")


@pytest.mark.slow
def test_a_run_whose_terminal_is_gone_saves(tmp_path: Path) -> None:
    """As after a lost SSH connection: the terminal hangs up, and what is written to it fails."""
    words = command(tmp_path)
    pid, master = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    events = tmp_path / "out" / "events.jsonl"
    os.set_blocking(master, False)

    def has_steps() -> bool:
        with_output = True
        while with_output:  # it must not wait for us
            try:
                with_output = bool(os.read(master, 1 << 16))
            except BlockingIOError:
                with_output = False
        return events.is_file() and '"step"' in events.read_text()

    wait_until(has_steps, what="the first steps")
    os.close(master)
    ended: list[int] = []

    def has_ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([status] if done else [])
        return bool(done)

    wait_until(has_ended, what="its end")
    assert os.waitstatus_to_exitcode(ended[0]) == 129
    assert_saved(tmp_path / "out")


IN_A_DESTRUCTOR = """
import signal, time
import rowstead.cli.app
from rowstead.cli import main

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def app(standalone_mode):
    Interrupted()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)

rowstead.cli.app.app = app
main.command()
"""


def test_ctrl_c_that_arrives_in_a_destructor_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_DESTRUCTOR], capture_output=True, text=True, timeout=50)
    assert done.returncode == 130
    assert done.stderr == "error: interrupted: progress since the last checkpoint is lost\n"


@pytest.mark.slow
def test_ctrl_c_during_start_up_prints_no_traceback(tmp_path: Path) -> None:
    """While it imports, compiles and opens its log: compiled kernels are not kept, so that some are compiled."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    words = command(tmp_path)
    for delay_s in (0.2, 0.8, 2.0, 4.0):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            time.sleep(delay_s)  # what is interrupted is the point
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 130, said
        assert "Traceback" not in said
        assert "Exception ignored" not in said


def test_a_search_that_was_stopped_ends_with_the_code_of_the_signal(tmp_path: Path) -> None:
    def stop(number: int, ne: float) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    def search() -> None:
        with _stoppable(terminal(quiet=True)):
            run_trial(small_spec("train.eval_every=10"), tmp_path / "trial", is_bad=stop)

    with pytest.raises(typer.Exit) as ended:
        search()
    assert ended.value.exit_code == 143
