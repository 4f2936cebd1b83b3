"""`rowstead train --profile`: a trace of a few steps for Perfetto, and a table of where their time went."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from rowstead.records.files import write_atomic
from rowstead.records.temporary import temporary_folder
from rowstead.records.timers import Timers
from rowstead.report.placement import align_columns
from rowstead.spec.phases import Phase

SKIPPED_STEPS = 10
"""Steps before the trace, in which kernels are compiled and memory is allocated."""
TRACED_STEPS = 20
WARM_STEPS = 2
"""Skipped steps in which the profiler already runs: its first steps are slow."""
READING = "reading a batch"
MAX_OPERATORS = 8
"""In a table."""

T = TypeVar("T")


class Profiler:
    """Traces some steps: operators of all threads, GPU kernels, and the phases of `timers` as ranges.

    The training thread calls `after_step` after each step and `close` at the end. Other steps are not recorded.
    """

    def __init__(
        self, path: Path, timers: Timers, device: torch.device, report: Callable[[str], None], *, steps_before: int = 0
    ) -> None:
        self._path, self._timers, self._report, self._steps_before = path, timers, report, steps_before
        self._threads = {threading.get_native_id(): "training"}
        self._num_steps = 0
        self._before: dict[Phase, float] = {}
        self._started_s = 0.0
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile: profile | None = profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED_STEPS - WARM_STEPS, warmup=WARM_STEPS, active=TRACED_STEPS, repeat=1),
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs between our lines
        self._profile.start()

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; reading each is a range in the thread that iterates."""
        self._threads[threading.get_native_id()] = "reader"
        try:
            while True:
                with record_function(READING):
                    item = next(batches, None)
                if item is None:
                    return
                yield item
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def after_step(self) -> None:
        """Count a step; starts and ends the trace when it is time."""
        if self._profile is None:
            return
        self._num_steps += 1
        if self._num_steps == SKIPPED_STEPS + TRACED_STEPS:
            self.close()
            return
        self._profile.step()
        if self._num_steps == SKIPPED_STEPS:
            self._wait_for_gpu()
            self._timers.observer = _Ranges()
            self._before, self._started_s = self._timers.totals_s(), time.perf_counter()

    def close(self) -> None:
        """End the trace, write it and report; does nothing if it has ended."""
        if self._profile is None:
            return
        ended, self._profile = self._profile, None
        self._wait_for_gpu()
        elapsed_s = time.perf_counter() - self._started_s
        totals = self._timers.totals_s()
        self._timers.observer = None
        num_traced = self._num_steps - SKIPPED_STEPS
        ended.stop()
        if num_traced < 1:
            self._report(f"nothing was profiled: the first {SKIPPED_STEPS} steps are skipped, and there were no more")
            return
        try:
            self._write(ended)
            written = f"the trace is in {self._path}: open it at https://ui.perfetto.dev or chrome://tracing"
        except OSError as error:
            written = f"the trace could not be written: {error}"
        phase_s = {phase: total - self._before.get(phase, 0.0) for phase, total in totals.items()}
        first, last = self._steps_before + SKIPPED_STEPS + 1, self._steps_before + self._num_steps
        self._report(
            f"where the time of steps {first} to {last} went, while they were traced:\n"
            + _table(("phase", "ms per step", "share"), _phase_rows(phase_s, elapsed_s, num_traced))
            + "\n"
            + self._operators(ended, elapsed_s, num_traced)
            + f"\n{written}"
        )

    def _wait_for_gpu(self) -> None:
        """The GPU runs behind the host: the trace starts and ends with an idle GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def _operators(self, ended: profile, elapsed_s: float, num_steps: int) -> str:
        """The reader's time, and the operators and GPU kernels that took most."""
        averages = list(ended.key_averages())
        reading_s = sum(one.cpu_time_total for one in averages if one.key == READING) * 1e-6
        lines = [f"reader's thread: {reading_s / num_steps * 1e3:.2f} ms per step, in parallel"]
        for on_gpu, what in ((False, "operators"), (True, "GPU kernels")):
            spent = [
                (one.key, (one.self_device_time_total if on_gpu else one.self_cpu_time_total) * 1e-6)
                for one in averages
                if not one.is_user_annotation
            ]
            most = [entry for entry in sorted(spent, key=lambda entry: -entry[1])[:MAX_OPERATORS] if entry[1] > 0]
            if most:
                rows = [(name[:60], f"{s / num_steps * 1e3:.2f}", f"{s / elapsed_s:.0%}") for name, s in most]
                lines.append(_table((f"{what} that took most", "ms per step", "share"), rows))
        return "\n".join(lines)

    def _write(self, ended: profile) -> None:
        with temporary_folder() as folder:
            file = folder / "trace.json"
            ended.export_chrome_trace(str(file))
            trace: dict[str, Any] = json.loads(file.read_bytes())
        named = {(os.getpid(), thread): name for thread, name in self._threads.items()}
        events = [e for e in trace["traceEvents"] if e["name"] != "thread_name" or (e["pid"], e["tid"]) not in named]
        trace["traceEvents"] = events + [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}}
            for (pid, thread), name in named.items()
        ]
        write_atomic(self._path, json.dumps(trace))


class _Ranges:
    """Records the phases of a Timers as ranges of torch's profiler."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def begin(self, phase: Phase) -> None:
        self._open.append(record_function(phase.value))
        self._open[-1].__enter__()

    def end(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _phase_rows(phase_s: dict[Phase, float], elapsed_s: float, num_steps: int) -> list[tuple[str, str, str]]:
    """Phases that took any time, the longest first, then the rest, then the whole step."""
    spent = sorted(((phase.value, s) for phase, s in phase_s.items() if s > 0), key=lambda entry: -entry[1])
    spent.append(("other", max(0.0, elapsed_s - sum(phase_s.values()))))
    spent.append(("step", elapsed_s))
    return [(name, f"{s / num_steps * 1e3:.2f}", f"{s / elapsed_s:.0%}") for name, s in spent]


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"  {line}" for line in align_columns([headings, *rows], numbers=range(1, len(headings))))
