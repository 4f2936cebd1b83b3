"""Starts the processes of a job on this machine, and starts them all again when one of them is killed.

The processes find each other through a file and talk over the loopback interface: no port is open to other machines. They get the
environment that torchrun would give them, so whoever starts them makes no difference to them. No torch is needed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rowstead.records.usage import free_host_bytes
from rowstead.spec.errors import RowsteadError
from rowstead.spec.job import LAUNCHER, MEETING_FILE, RESTARTS
from rowstead.spec.sizes import shown_bytes

MAX_RESTARTS = 3
MISTAKE, LOST, INTERRUPTED = 2, 75, 130
"""Exit codes: of a user's mistake, of a process that can only say that another has gone, and after Ctrl-C."""
GRACE_S = 10.0
"""How long the others may take to end by themselves once one has failed, and again once they were told to."""
LOOK_EVERY_S = 0.02
PROCESS_BYTES = 150 << 20
"""What a process takes before it has any table, at least."""


@dataclass(frozen=True)
class RestartVerdict:
    """What becomes of a job of which a process has failed."""

    restarts: bool
    code: int
    """To end with, if it is not started again."""
    why: str | None = None
    """What to tell the user; none where the process has said it itself."""


def judge(codes: Sequence[int | None], *, restarts_left: int) -> RestartVerdict:
    """From the exit codes of all processes, negative for signals: only one that was killed is worth another start."""
    failed = {rank: code for rank, code in enumerate(codes) if code}
    causes = {rank: code for rank, code in failed.items() if code != LOST} or failed
    rank, code = min(causes.items(), key=lambda item: (item[1] > 0, item[0]))  # killed ones first: they could not speak
    if code == LOST:
        return RestartVerdict(restarts_left > 0, 1, f"process {rank} has lost touch with the others")
    if code > 0:
        return RestartVerdict(False, code)
    return RestartVerdict(restarts_left > 0, 1, f"process {rank} was killed by {_signal_name(-code)}")


def launch(arguments: Sequence[str], num_processes: int, *, say: Callable[[str], None]) -> int:
    """Run `python -m rowstead` with these arguments in so many processes until all have ended; returns the exit code.

    The first Ctrl-C or SIGTERM is passed on, and they save and stop; the second kills them.
    """
    needs, free = num_processes * PROCESS_BYTES, free_host_bytes()
    if needs > free:
        raise RowsteadError(
            f"{num_processes:,} processes take {shown_bytes(needs)} of memory before they have any table, and {shown_bytes(free)} "
            f"are free: start {max(1, free // PROCESS_BYTES):,} at most, one for each core is best"
        )
    for attempt in range(MAX_RESTARTS + 1):
        with tempfile.TemporaryDirectory(prefix="rowstead-") as folder:
            meeting = Path(folder) / "meeting"
            with _Processes(arguments, num_processes, meeting, attempt) as processes:
                codes = processes.wait()
            if codes and not any(codes):
                return 0
            verdict = None if processes.was_stopped else judge(codes, restarts_left=MAX_RESTARTS - attempt)
            if verdict is None or verdict.why is None:
                for text in _reasons(meeting, codes)[:1]:
                    say(text)
                return INTERRUPTED if verdict is None else verdict.code
        if not verdict.restarts:
            say(f"{verdict.why}, and the job was started {attempt + 1} times: giving up. Its last checkpoint is on disk")
            return verdict.code
        say(f"{verdict.why}: starting all {num_processes} again from the last checkpoint ({attempt + 1} of {MAX_RESTARTS})")
    raise AssertionError("the last attempt has a verdict")


class _Processes:
    """The processes of one attempt, none of which outlives it."""

    def __init__(self, arguments: Sequence[str], num_processes: int, meeting: Path, attempt: int) -> None:
        self._command = [sys.executable, "-m", "rowstead", *arguments]
        self._environments = [environment(rank, num_processes, meeting, attempt) for rank in range(num_processes)]
        self._all: list[subprocess.Popen[bytes]] = []
        self._num_asked = 0

    @property
    def was_stopped(self) -> bool:
        """Whether the user asked for it."""
        return self._num_asked > 0

    def __enter__(self) -> _Processes:
        # Before the first is started: whoever is told to stop meanwhile must leave none behind.
        self._before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for env in self._environments:
                if self.was_stopped:
                    break
                self._all.append(subprocess.Popen(self._command, env=env, start_new_session=True))
            if self.was_stopped:  # also the one that was just being started
                self._tell(signal.SIGTERM)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._tell(signal.SIGKILL)
        for process in self._all:
            process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> list[int | None]:
        """The exit codes, once all have ended or one has failed and the others had their time."""
        while not any(codes := self._codes()) and None in codes:
            time.sleep(LOOK_EVERY_S)
        for then in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + GRACE_S
            while None in self._codes() and time.monotonic() < until:
                time.sleep(LOOK_EVERY_S)
            self._tell(then)
        for process in self._all:
            process.wait()
        return self._codes()

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._all]

    def _tell(self, number: int) -> None:
        for process in self._all:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._num_asked += 1
        self._tell(number if self._num_asked == 1 else signal.SIGKILL)


def environment(
    rank: int, num_processes: int, meeting: Path, attempt: int, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What one process is told: torchrun's variables, a fair share of the cores, and to stay on the loopback interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        RESTARTS: attempt,
        MEETING_FILE: meeting,
        LAUNCHER: os.getpid(),
    }
    return {**defaults, **inherited, **{name: str(value) for name, value in own.items()}}


# In the processes that were started


def is_started_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `launch` has started this process."""
    return MEETING_FILE in environment


def leave_reason(text: str) -> None:
    """Tell `launch` why this process fails, beside the file through which they meet; it tells the user once, for all."""
    with contextlib.suppress(OSError):
        Path(f"{os.environ[MEETING_FILE]}-{os.environ['RANK']}").write_text(text)


def end_with_parent() -> None:
    """Ask this process to stop, as Ctrl-C would, should whoever started it be gone, perhaps already."""
    parent = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(6 * GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


def _reasons(meeting: Path, codes: Sequence[int | None]) -> list[str]:
    """What processes said they failed of, in the order of ranks."""
    files = [Path(f"{meeting}-{rank}") for rank, code in enumerate(codes) if code not in (0, LOST)]
    return [file.read_text() for file in files if file.is_file()]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
