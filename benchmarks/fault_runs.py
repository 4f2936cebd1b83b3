"""Runs that are disturbed: starts and resumes the command of a schedule, finds the victims of each fault, and does it to them.

A run is resumed until it has finished. Every end before that has to be explained by a fault: see `fault_oracle.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from benchmarks.fault_command import POLL_INTERVAL_S, ForkedCommand
from benchmarks.fault_effects import SmallDisk, cut_tcp, send
from benchmarks.fault_links import Links
from benchmarks.fault_recipe import NUM_STEPS, recipe
from benchmarks.fault_schedules import FORK_SERVER, MAIN, RANKS, Fault, Schedule

MAX_RESTARTS = 50
"""Of a role: the faults of a schedule must not add up to a role that fails too often."""
DEADLINE_S, STALLED_S = 3600.0, 600.0
"""Of a whole schedule, and of a time without any step. Other work on the machine may make a run twenty times slower."""
VICTIM_WAIT_S = 5.0
"""How long a victim may be missing, because it is being restarted, before its fault is left out."""
GONE_S = 30.0
"""Time for the processes of a run to exit after it."""
MAX_STARTS = 30
DUTY_S = (0.04, 0.01)
"""A slow process is stopped and continued for so long in turns."""


@dataclass
class Part:
    """One process of the command, from its start to its end."""

    num_steps_before: int
    num_lost_updates_at: dict[int, int]
    """Of a fleet, by the steps of the checkpoints that were there before it: how many updates were lost until then."""
    started_s: float
    log: Path
    sent: set[int] = field(default_factory=set)
    """Signals that the main process got, to stop or to die."""
    killed: set[tuple[str, int]] = field(default_factory=set)
    """Names and process ids of the roles and ranks that were killed, or frozen for good."""
    frozen_for_good: set[str] = field(default_factory=set)
    was_cut: bool = False
    """Whether connections between its processes were closed."""
    disk_was_full: bool = False
    code: int | None = None

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Result:
    """What a disturbed run has left, for the oracle."""

    schedule: Schedule
    out: Path
    temporary: Path
    """TMPDIR of the run."""
    parts: list[Part]
    injected: list[Fault]
    skipped: dict[str, int]
    """Faults that were left out, by the reason."""
    hang: str | None = None
    remaining: list[str] = field(default_factory=list)
    """Command lines of processes that were still there some time after the end."""


class StalledError(Exception):
    """A run neither progresses nor ends."""


class DisturbedRun:
    """One schedule's run. Everything of it is under `folder`, the temporary files of its processes too."""

    def __init__(self, schedule: Schedule, folder: Path, *, is_warm: bool = False) -> None:
        """`is_warm` forks the command instead of starting it, but for a job of several processes."""
        self.schedule, self._folder, self._is_warm = schedule, folder, is_warm
        self._temporary = folder / "t"
        self._temporary.mkdir()
        self._environment = {**os.environ, "TMPDIR": str(self._temporary), "COLUMNS": "200"}
        self._environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")  # torch leaves it in TMPDIR
        self._disk = SmallDisk(folder / "disk", self.processes) if "full disk" in schedule.has else None
        self._out = (self._disk.path if self._disk is not None else folder) / "run"
        self._links: Links | None = None
        self._recipe = folder / "recipe.yaml"
        tables = folder / "tables"
        tables.mkdir()
        self._recipe.write_text(yaml.safe_dump(recipe(schedule, tables)))
        self._parts: list[Part] = []
        self._injected: list[Fault] = []
        self._skipped: dict[str, int] = {}
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._slow: list[tuple[float, list[psutil.Process]]] = []
        self._is_stopped, self._turned_s = False, 0.0
        self._main: subprocess.Popen[bytes] | ForkedCommand | None = None
        self._deadline = time.monotonic() + DEADLINE_S
        self._moved_s, self._moved_at = time.monotonic(), (-1, -1)

    def run(self) -> Result:
        """Run the schedule to its end, and return what is left; the folder stays."""
        hang, remaining = None, list[str]()
        with contextlib.ExitStack() as stack:
            if self.schedule.has & {"cut link", "slow link"} and self.schedule.mode == "fleet":
                self._links = stack.enter_context(Links(self._temporary))
            try:
                self._start()
                for fault in self.schedule.faults:
                    if self._wait_for(fault) and self._inject(fault):
                        self._injected.append(fault)
                while self._wait_for_end() != 0:
                    self._start()
                self._undo_all(at_once=True)
                remaining = self._wait_until_gone()
            except StalledError as stalled:
                hang = str(stalled)
            finally:
                self._undo_all(at_once=True)
                for process in self.processes():
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                if self._main is not None:
                    self._main.wait()
        return Result(
            self.schedule,
            self._out,
            self._temporary,
            self._parts,
            self._injected,
            self._skipped,
            hang=hang,
            remaining=remaining,
        )

    def close(self) -> None:
        if self._disk is not None:
            self._disk.remove()

    # Starting and waiting

    def _start(self) -> None:
        """Start the command, or resume its run where there is one."""
        if len(self._parts) > MAX_STARTS:
            raise StalledError(f"the run was started {len(self._parts)} times")
        arguments = ["train", "--resume", str(self._out)]
        if not (self._out / "spec.yaml").exists():  # killed before there was a run: what its folder has is none
            shutil.rmtree(self._out, ignore_errors=True)
            arguments = ["train", str(self._recipe), "--out", str(self._out)]
            if self.schedule.mode == "fleet":
                more = f"{self.schedule.fleet},snapshot_every_s=2,max_restarts={MAX_RESTARTS},start_s={STALLED_S:g}"
                arguments += ["--fleet", more]
        if self.schedule.mode == "processes":
            arguments += ["--processes", "2"]
        log = self._folder / f"printed-{len(self._parts)}.txt"
        is_full = self._disk is not None and self._disk.is_full
        self._parts.append(Part(self.num_steps, self._lost_at_checkpoints(), time.monotonic(), log, disk_was_full=is_full))
        if self._is_warm and self.schedule.mode != "processes":
            self._main = ForkedCommand(arguments, log, self._environment)
            return
        with open(log, "wb") as file:
            command = [sys.executable, "-m", "rowstead", *arguments]
            self._main = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    @property
    def num_steps(self) -> int:
        """Steps by the last event; after a resume fewer than before."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            with open(self._out / "events.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                found = re.findall(rb'"step": (\d+)', file.read())
            return int(found[-1]) if found else 0
        return 0

    def _lost_at_checkpoints(self) -> dict[int, int]:
        found = {}
        for manifest in self._out.glob("checkpoints/step-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                position = json.loads(manifest.read_text())["facts"]["position"]
                found[int(position["step"])] = int(position["num_lost_updates"])
        return found

    def _tick(self) -> None:
        """Do what is due meanwhile; raise StalledError if nothing moves any more."""
        time.sleep(POLL_INTERVAL_S)
        self._undo_all()
        now = time.monotonic()
        self._slow = [one for one in self._slow if one[0] > now or self._continue(one[1])]
        if self._slow and now > self._turned_s:
            self._is_stopped = not self._is_stopped
            self._turned_s = now + DUTY_S[0 if self._is_stopped else 1]
            number = signal.SIGSTOP if self._is_stopped else signal.SIGCONT
            for _, processes in self._slow:
                send(processes, number)
        moved_at = len(self._parts), self.num_steps
        if moved_at != self._moved_at:
            self._moved_s, self._moved_at = now, moved_at
        if now > self._deadline or now > self._moved_s + STALLED_S:
            which = "finished" if now > self._deadline else "progressed"
            within_s = DEADLINE_S if now > self._deadline else STALLED_S
            raise StalledError(f"not {which} within {within_s:g} s, at step {self.num_steps:,}")

    def _wait_for(self, fault: Fault) -> bool:
        """Wait until a fault is due, resuming the run as often as it ends; False if it has finished before."""
        due_steps = int(fault.at * NUM_STEPS[self.schedule.mode])
        reached_s: float | None = None
        while True:
            if self._has_ended():
                if self._parts[-1].code == 0:
                    self._skip("the run had finished")
                    return False
                self._start()
            started_s = self._parts[-1].started_s
            if reached_s is None and (self._parts[-1].num_steps_before >= due_steps or self.num_steps >= due_steps):
                reached_s = time.monotonic()
            if reached_s is not None and time.monotonic() >= max(reached_s, started_s) + fault.delay_s:
                return True
            self._tick()

    def _has_ended(self) -> bool:
        assert self._main is not None
        code = self._main.poll()
        if code is None:
            return False
        self._parts[-1].code = code
        return True

    def _wait_for_end(self) -> int:
        while not self._has_ended():
            self._tick()
        code = self._parts[-1].code
        assert code is not None
        return code

    def processes(self) -> list[psutil.Process]:
        """All processes of this run, whoever started them: they have its TMPDIR."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = process.environ().get("TMPDIR") == str(self._temporary)
                is_ours |= isinstance(self._main, ForkedCommand) and process.pid == self._main.pid  # has our environment
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _wait_until_gone(self) -> list[str]:
        """Wait until no process is left; return the command lines of those that stay."""
        ends = time.monotonic() + GONE_S
        while (found := self.processes()) and time.monotonic() < ends:
            time.sleep(0.05)
        lines = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                lines.append(f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}")
        return lines

    # Faults

    def _inject(self, fault: Fault) -> bool:
        part = self._parts[-1]
        if fault.kind == "full disk":
            return self._fill_disk(fault, part)
        if fault.kind in ("cut link", "slow link"):
            return self._disturb_links(fault, part)
        found = self._find(fault)
        if not found:
            return self._skip("none of its victims was running")
        for name, process in found.items():
            if name == MAIN:
                self._note_main(fault, part)
            elif fault.kind == "kill" or (fault.kind == "freeze" and fault.duration_s is None):
                part.killed |= self._with_children(name, process)
            if fault.kind == "freeze" and fault.duration_s is None:
                part.frozen_for_good.add(name)
        processes = list(found.values())
        if fault.kind == "kill":
            send(processes, signal.SIGKILL)
        elif fault.kind in ("stop", "stop and kill"):
            assert fault.signal is not None
            send(processes, signal.Signals[fault.signal])
            if fault.kind == "stop and kill":
                self._later(fault, lambda: send(processes, signal.SIGKILL))
        elif fault.kind == "freeze":
            send(processes, signal.SIGSTOP)
            if fault.duration_s is not None:
                self._later(fault, lambda: send(processes, signal.SIGCONT))
        else:
            assert fault.duration_s is not None
            self._slow.append((time.monotonic() + fault.duration_s, processes))
        return True

    def _skip(self, why: str) -> bool:
        self._skipped[why] = self._skipped.get(why, 0) + 1
        return False

    def _note_main(self, fault: Fault, part: Part) -> None:
        if fault.kind in ("kill", "stop and kill"):
            part.sent.add(signal.SIGKILL)
        if fault.signal is not None:
            part.sent.add(signal.Signals[fault.signal])

    def _with_children(self, name: str, process: psutil.Process) -> set[tuple[str, int]]:
        """A victim and, for the fork server, the roles that die with it."""
        found = {(name, process.pid)}
        if name == FORK_SERVER:
            with contextlib.suppress(psutil.Error):
                found |= {(f"child of {name}", child.pid) for child in process.children()}
        return found

    def _find(self, fault: Fault) -> dict[str, psutil.Process]:
        """The victims that run, by name; those that are being restarted are waited for."""
        ends = time.monotonic() + VICTIM_WAIT_S
        while True:
            found = {}
            for name in fault.victims:
                with contextlib.suppress(psutil.Error, OSError, ValueError, StopIteration):
                    found[name] = self._process(name)
            if len(found) == len(fault.victims) or time.monotonic() > ends or self._has_ended():
                return found
            self._tick()

    def _process(self, name: str) -> psutil.Process:
        assert self._main is not None
        if name == MAIN:
            return psutil.Process(self._main.pid)
        if name in RANKS:
            rank = name.partition("-")[2]
            children = psutil.Process(self._main.pid).children()
            return next(child for child in children if child.environ().get("RANK") == rank)
        if name == FORK_SERVER:
            return next(
                child for child in psutil.Process(self._main.pid).children() if "rowstead.fleet.roles" in child.cmdline()
            )
        address = self._out / "roles" / f"{name}.json"
        process = psutil.Process(json.loads(address.read_text())["pid"])
        if process.status() == psutil.STATUS_ZOMBIE or process.environ().get("TMPDIR") != str(self._temporary):
            raise ValueError
        return process

    def _fill_disk(self, fault: Fault, part: Part) -> bool:
        assert self._disk is not None
        if not self._disk.is_mounted and self.schedule.mode == "fleet":
            return self._skip("only root can mount a small disk for a fleet")
        self._disk.fill()
        part.disk_was_full = True
        disk = self._disk
        self._later(fault, disk.free)
        return True

    def _disturb_links(self, fault: Fault, part: Part) -> bool:
        assert fault.duration_s is not None
        part.was_cut |= fault.kind == "cut link"
        if self.schedule.mode == "processes":
            return cut_tcp(self._find(fault).values()) or self._skip("only root can close TCP connections (`ss -K`)")
        assert self._links is not None
        for server in fault.victims:
            if fault.kind == "cut link":
                self._links.cut(server, fault.duration_s)
            else:
                self._links.slow_down(server, fault.duration_s)
        return True

    def _later(self, fault: Fault, undo: Callable[[], None]) -> None:
        assert fault.duration_s is not None
        self._undo.append((time.monotonic() + fault.duration_s, undo))

    def _undo_all(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        due = [undo for due_s, undo in self._undo if at_once or due_s <= now]
        self._undo = [one for one in self._undo if one[1] not in due]
        for undo in due:
            undo()
        if at_once:
            for _, processes in self._slow:
                self._continue(processes)
            self._slow = []

    def _continue(self, processes: list[psutil.Process]) -> bool:
        send(processes, signal.SIGCONT)
        return False


@contextlib.contextmanager
def disturbed(schedule: Schedule, *, is_warm: bool = False) -> Iterator[Result]:
    """Run a schedule in a temporary folder, which is there inside the `with`."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        running = DisturbedRun(schedule, Path(folder), is_warm=is_warm)
        try:
            yield running.run()
        finally:
            running.close()
