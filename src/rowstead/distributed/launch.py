"""Launches the processes of a synchronous job on this machine, and restarts all of them when one is killed.

The processes rendezvous through a file and communicate over the loopback interface: no port is open to other machines. They get the
environment variables that torchrun sets, so they run the same under either launcher. This module does not import torch; the fleet shares its
exit codes and `exit_with_launcher`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rowstead.distributed.stop import exit_code_of, leave_terminal, stop_signals
from rowstead.records.temporary import temporary_folder
from rowstead.records.usage import free_host_bytes, usable_cores
from rowstead.spec.errors import RowsteadError
from rowstead.spec.job import LAUNCHER, RENDEZVOUS_FILE, RESTARTS
from rowstead.spec.sizes import format_bytes

MAX_RESTARTS = 3
USER_ERROR, LOST, INTERRUPTED = 2, 75, exit_code_of(signal.SIGINT)
"""Exit codes: a user's mistake, a process that only lost its peers, and Ctrl-C."""
GRACE_S = 10.0
"""Time for the other processes to exit by themselves after one has failed, and again after SIGTERM."""
POLL_INTERVAL_S = 0.02
PROCESS_BYTES = 150 << 20
"""Minimum memory of a process before it has any table."""


@dataclass(frozen=True)
class JobDecision:
    """What to do with a job after one of its processes has failed."""

    restarts: bool
    exit_code: int
    """Exit code of the launcher if the job is not restarted."""
    reason: str | None = None
    """Message for the user; None if the process has reported the reason itself."""


def decide_restart(exit_codes: Sequence[int | None], *, restarts_left: int) -> JobDecision:
    """Decide from the exit codes of all processes, negative for signals: only a killed process is worth a restart."""
    failed = {rank: code for rank, code in enumerate(exit_codes) if code}
    causes = {rank: code for rank, code in failed.items() if code != LOST} or failed
    rank, code = min(causes.items(), key=lambda item: (item[1] > 0, item[0]))  # killed processes first: they reported nothing
    if code == LOST:
        return JobDecision(restarts_left > 0, 1, f"process {rank} lost its connection to the others")
    if code > 0:
        return JobDecision(False, code)
    return JobDecision(restarts_left > 0, 1, f"process {rank} was killed by {signal_name(-code)}")


def launch(arguments: Sequence[str], num_processes: int, *, on_message: Callable[[str], None]) -> int:
    """Run `python -m rowstead` with these arguments in `num_processes` processes until all have exited; return the exit code.

    At the first Ctrl-C, SIGTERM or SIGHUP the processes save and stop; the second kills them.
    """
    needed, free = num_processes * PROCESS_BYTES, free_host_bytes()
    if needed > free:
        raise RowsteadError(
            f"{num_processes:,} processes need {format_bytes(needed)} of memory before they have any table, and {format_bytes(free)} "
            f"are free: start at most {max(1, free // PROCESS_BYTES):,}; one per core is best"
        )
    for attempt in range(MAX_RESTARTS + 1):
        with temporary_folder() as folder:
            rendezvous = folder / "rendezvous"
            with _Processes(arguments, num_processes, rendezvous, attempt) as processes:
                codes = processes.wait()
            if codes and not any(codes):
                return 0
            decision = None if processes.was_stopped else decide_restart(codes, restarts_left=MAX_RESTARTS - attempt)
            if decision is None or decision.reason is None:
                for text in _read_reasons(rendezvous, codes)[:1]:
                    on_message(text)
                if decision is None and any(codes) and (lost := decide_restart(codes, restarts_left=0).reason) is not None:
                    on_message(f"{lost} before all had stopped: progress since the last checkpoint is lost")
                return exit_code_of(processes.stopped_by) if decision is None else decision.exit_code
        if not decision.restarts:
            on_message(f"{decision.reason}; giving up after {attempt + 1} starts. The last checkpoint is on disk")
            return decision.exit_code
        on_message(
            f"{decision.reason}: restarting all {num_processes} from the last checkpoint ({attempt + 1} of {MAX_RESTARTS})"
        )
    raise AssertionError("the last attempt always returns")


class _Processes:
    """The processes of one attempt; none outlives the `with` block."""

    def __init__(self, arguments: Sequence[str], num_processes: int, rendezvous: Path, attempt: int) -> None:
        self._command = [sys.executable, "-m", "rowstead", *arguments]
        self._environments = [process_environment(rank, num_processes, rendezvous, attempt) for rank in range(num_processes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._num_stop_requests = 0
        self.stopped_by: int | None = None
        """The first signal that asked to stop."""

    @property
    def was_stopped(self) -> bool:
        """Whether the user asked to stop."""
        return self._num_stop_requests > 0

    def __enter__(self) -> _Processes:
        # Before the first start: a stop request that arrives meanwhile must leave no process behind.
        self._old_handlers = {number: signal.signal(number, self._forward) for number in stop_signals()}
        try:
            for env in self._environments:
                if self.was_stopped:
                    break
                self._processes.append(subprocess.Popen(self._command, env=env, start_new_session=True))
            if self.was_stopped:  # also the process that was just being started
                self._send(signal.SIGTERM)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def wait(self) -> list[int | None]:
        """Wait until all have exited, or one has failed and the others had their grace period; return the exit codes."""
        while not any(codes := self._exit_codes()) and None in codes:
            time.sleep(POLL_INTERVAL_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE_S
            while None in self._exit_codes() and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
            self._send(number)
        for process in self._processes:
            process.wait()
        return self._exit_codes()

    def _exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            if self.was_stopped:  # a shell and the system may both send one
                return
        self._num_stop_requests += 1
        self.stopped_by = self.stopped_by or number
        # Not SIGINT: a process that is still starting would print a traceback.
        self._send(signal.SIGTERM if self._num_stop_requests == 1 else signal.SIGKILL)


def process_environment(
    rank: int, num_processes: int, rendezvous: Path, attempt: int, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Build the environment of one process: torchrun's variables, an equal share of the cores, loopback networking."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // num_processes)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        RESTARTS: attempt,
        RENDEZVOUS_FILE: rendezvous,
        LAUNCHER: os.getpid(),
    }
    return {**defaults, **inherited, **{name: str(value) for name, value in own.items()}}


# In the processes that were started


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `launch` has started this process."""
    return RENDEZVOUS_FILE in environment


def write_reason(text: str) -> None:
    """Report to `launch` why this process fails, in a file beside the rendezvous file; it prints one reason for all processes."""
    with contextlib.suppress(OSError):
        Path(f"{os.environ[RENDEZVOUS_FILE]}-{os.environ['RANK']}").write_text(text)


def exit_with_launcher(stop_signal: signal.Signals = signal.SIGTERM, grace_s: float = 6 * GRACE_S) -> None:
    """Watch the launcher in a thread: when it is gone, send `stop_signal` to this process, and exit after `grace_s`.

    Does nothing in a process that the user started.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.25)
        os.kill(os.getpid(), stop_signal)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="watch launcher", daemon=True).start()


def _read_reasons(rendezvous: Path, exit_codes: Sequence[int | None]) -> list[str]:
    """Read the reasons that failed processes have reported, by rank."""
    files = [Path(f"{rendezvous}-{rank}") for rank, code in enumerate(exit_codes) if code not in (0, LOST)]
    return [file.read_text() for file in files if file.is_file()]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
