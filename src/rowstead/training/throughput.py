"""Training throughput, whether the reader keeps up with it, and how many cores would read fast enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARM_STEPS = 10
"""First steps of a process, in which kernels are compiled and memory is allocated."""
MIN_STALLED_SHARE, MIN_STALLED_S = 0.1, 0.5
"""A stall below either of these, as a share of the time or in seconds, is not reported."""
BUSY_SHARE = 0.8
"""A thread that is busy for at least this share of the time is taken to be the bottleneck."""
SPREAD_SHARE = 0.6
"""If reading for a GPU used a smaller share of the cores than this, it was not short of cores and would not use more of them."""
MIN_IDLE_SHARE = 0.25
"""A GPU that was idle for at least this share of the time, though data was there, is reported."""


class Throughput:
    """Samples over training time, and the share of that time spent waiting for data.

    Training time is that of steps, waiting for data included, evaluations and checkpoints not. The first `WARM_STEPS` steps are left out
    once as many others have been made. A trainer of a fleet has one for each of its threads; the throughput of the fleet is the
    samples of all threads over the time of the one that trained longest (`fleet/fleet_figures.py`).
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._now = self._warm = (0, 0.0, 0.0)

    def add(self, num_samples: int, step_s: float, *, waited_s: float = 0.0) -> None:
        """Count a step; `waited_s` is the total time spent waiting for data since the process began."""
        samples, spent_s, _ = self._now
        self._num_steps += 1
        self._now = (samples + num_samples, spent_s + step_s, waited_s)
        if self._num_steps == WARM_STEPS:
            self._warm = self._now

    @property
    def samples_per_s(self) -> float | None:
        """None before the first step."""
        samples, spent_s, _ = self._counted()
        return samples / spent_s if samples and spent_s > 0 else None

    @property
    def num_samples(self) -> int:
        """Samples of the steps that count."""
        return self._counted()[0]

    @property
    def spent_s(self) -> float:
        """Seconds of the steps that count."""
        return self._counted()[1]

    @property
    def train_s(self) -> float:
        """Seconds of all steps."""
        return self._now[1]

    @property
    def waiting_share(self) -> float:
        """Share of the time spent waiting for data, from 0 to 1."""
        _, spent_s, waited_s = self._counted()
        return min(1.0, waited_s / spent_s) if spent_s > 0 else 0.0

    def _counted(self) -> tuple[int, float, float]:
        (samples, spent_s, waited_s), warm = self._now, self._warm
        if self._num_steps < 2 * WARM_STEPS:
            return self._now
        return samples - warm[0], spent_s - warm[1], waited_s - warm[2]


@dataclass(frozen=True, kw_only=True)
class ReaderReport:
    """Whether the reader kept up with training, and what it would need to."""

    stalled_share: float
    """Share of the time in which training stood still for lack of data."""
    max_samples_per_s: float
    """Throughput of training if data were always there."""
    cores_used: float
    """Cores that reading kept busy."""
    cores_needed: float
    """Cores that reading would keep busy at `max_samples_per_s`."""
    thread_share: float
    """Share of the time in which the thread that assembles batches was busy."""
    idle_share: float = 0.0
    """Share of the time in which a GPU was idle though data was there: the process did not launch steps fast enough."""

    def figures(self) -> dict[str, float]:
        """The figures for a record."""
        return {
            "reading_held_up_share": self.stalled_share,
            "alone_samples_per_s": self.max_samples_per_s,
            "reader_cores_used": self.cores_used,
            "reader_cores_needed": self.cores_needed,
        }


def reader_report(
    *,
    samples_per_s: float,
    waiting_share: float,
    core_s_per_sample: float,
    thread_s_per_sample: float,
    gpu_s_per_sample: float | None = None,
) -> ReaderReport:
    """Judge the reader by the figures of a run.

    `core_s_per_sample` is the processor time of all reading threads, `thread_s_per_sample` that of the one that assembles batches.
    `gpu_s_per_sample` is how long a GPU was busy; without it the training thread computes whenever it does not wait.
    """
    if gpu_s_per_sample is None:
        max_per_s = samples_per_s / max(1.0 - waiting_share, 1e-3)
    else:
        max_per_s = max(samples_per_s, 1.0 / max(gpu_s_per_sample, 1e-12))
    # The host also waits for data while a GPU is still busy with earlier batches; that costs nothing.
    stalled_share = min(waiting_share, 1.0 - samples_per_s / max_per_s)
    return ReaderReport(
        stalled_share=stalled_share,
        max_samples_per_s=max_per_s,
        cores_used=core_s_per_sample * samples_per_s,
        cores_needed=core_s_per_sample * max_per_s,
        thread_share=thread_s_per_sample * samples_per_s,
        idle_share=0.0 if gpu_s_per_sample is None else max(0.0, 1.0 - samples_per_s / max_per_s - stalled_share),
    )


def reader_warning(report: ReaderReport, *, spent_s: float, num_cores: int, on_gpu: bool) -> str | None:
    """The warning for a run that waited for data, with a remedy; None if it hardly did. `num_cores` is what the process may use."""
    if report.stalled_share < MIN_STALLED_SHARE or report.stalled_share * spent_s < MIN_STALLED_S:
        return None
    text = f"Training waited for data {report.stalled_share:.0%} of the time{_remedy(report, num_cores, on_gpu=on_gpu)}."
    if report.idle_share >= MIN_IDLE_SHARE:
        text += f" For another {report.idle_share:.0%} the GPU was idle between steps: larger batches keep it busier."
    return text


def _remedy(report: ReaderReport, num_cores: int, *, on_gpu: bool) -> str:
    """What would help, as far as the figures show."""
    used, needed = _cores(report.cores_used), _cores(report.cores_needed)
    if report.thread_share >= BUSY_SHARE:
        return f"; reading used {used} cores, but one thread assembles the batches and is always busy"
    if on_gpu and report.cores_used < SPREAD_SHARE * num_cores:
        return (
            f", but reading used only {used} of {num_cores} cores, so more cores would not help: files arrive too slowly, "
            "`decode_threads` of the log is too low, there are few row groups, or other programs use the cores"
        )
    if on_gpu:
        text = f"; reading used {used} cores, and {needed} would keep this GPU busy (there {'is' if num_cores == 1 else 'are'} {num_cores} here)"
    else:
        text = f"; about {needed} more cores would fix it (training uses the {num_cores} here too)"
    return f"{text}. Fewer features or a lower `max_ids` also help" if report.cores_needed > num_cores else text


def _cores(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{math.ceil(number):,}"
