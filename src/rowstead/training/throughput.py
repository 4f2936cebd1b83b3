"""How fast training goes, whether reading holds it up, and how many cores would read fast enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARM_STEPS = 10
"""First steps of a process, in which kernels are compiled and memory is allocated."""
TOLD_SHARE, TOLD_S = 0.1, 0.5
"""ReadingReport that held training up for less, as a share of the time or in seconds, is not worth a line."""
BUSY_SHARE = 0.8
"""A thread that is busy for this share of the time or more is taken for the one that everybody waits for."""
SPREAD_SHARE = 0.6
"""ReadingReport that kept a smaller share of the cores busy beside a GPU was not short of cores, and would not use more of them either."""
IDLE_SHARE = 0.25
"""A GPU that waited for something other than data for this share of the time or more is worth a word."""


class Throughput:
    """Samples a second over the steps of this process, and how much of their time was spent waiting for data.

    The first steps are left out as soon as as many others have been made.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._now = self._warm = (0, 0.0, 0.0)

    def add(self, num_samples: int, step_s: float, *, waited_s: float) -> None:
        """Count a step; `waited_s` is the time spent waiting since the process began."""
        samples, spent_s, _ = self._now
        self._num_steps += 1
        self._now = (samples + num_samples, spent_s + step_s, waited_s)
        if self._num_steps == WARM_STEPS:
            self._warm = self._now

    @property
    def samples_per_s(self) -> float | None:
        """Absent before any step."""
        samples, spent_s, _ = self._counted()
        return samples / spent_s if samples and spent_s > 0 else None

    @property
    def spent_s(self) -> float:
        """Seconds of the steps that count."""
        return self._counted()[1]

    @property
    def waiting_share(self) -> float:
        """Of the time, from 0 to 1."""
        _, spent_s, waited_s = self._counted()
        return min(1.0, waited_s / spent_s) if spent_s > 0 else 0.0

    def _counted(self) -> tuple[int, float, float]:
        (samples, spent_s, waited_s), warm = self._now, self._warm
        if self._num_steps < 2 * WARM_STEPS:
            return self._now
        return samples - warm[0], spent_s - warm[1], waited_s - warm[2]


@dataclass(frozen=True, kw_only=True)
class ReadingReport:
    """Whether reading kept up with training, and what it would take."""

    held_up_share: float
    """Share of the time in which training stood still for want of data."""
    alone_samples_per_s: float
    """What training could do if batches were always there."""
    cores_used: float
    """Cores that reading kept busy."""
    cores_needed: float
    """Cores that reading would keep busy at the rate that training could do."""
    thread_share: float
    """Share of the time in which the one thread that hands over batches was busy."""
    idle_share: float = 0.0
    """Share of the time in which a GPU had nothing to do, though data was there: the process did not start steps fast enough."""

    def figures(self) -> dict[str, float]:
        """As a record has them."""
        return {
            "reading_held_up_share": self.held_up_share,
            "alone_samples_per_s": self.alone_samples_per_s,
            "reader_cores_used": self.cores_used,
            "reader_cores_needed": self.cores_needed,
        }


def reading_of(
    *,
    samples_per_s: float,
    waiting_share: float,
    core_s_per_sample: float,
    thread_s_per_sample: float,
    alone_s_per_sample: float | None = None,
) -> ReadingReport:
    """What the figures of a run say about its reading.

    `core_s_per_sample` is the processor time of all reading threads, `thread_s_per_sample` of the one among them that hands over
    batches. `alone_s_per_sample` is how long a GPU was busy; left out where the thread that trains does the work itself, which then
    is all that it does when it does not wait.
    """
    if alone_s_per_sample is None:
        alone_per_s = samples_per_s / max(1.0 - waiting_share, 1e-3)
    else:
        alone_per_s = max(samples_per_s, 1.0 / max(alone_s_per_sample, 1e-12))
    # The host waits for data also while a GPU is still busy with earlier batches, and that holds nobody up.
    held_up_share = min(waiting_share, 1.0 - samples_per_s / alone_per_s)
    return ReadingReport(
        held_up_share=held_up_share,
        alone_samples_per_s=alone_per_s,
        cores_used=core_s_per_sample * samples_per_s,
        cores_needed=core_s_per_sample * alone_per_s,
        thread_share=thread_s_per_sample * samples_per_s,
        idle_share=0.0 if alone_s_per_sample is None else max(0.0, 1.0 - samples_per_s / alone_per_s - held_up_share),
    )


def reading_line(reading: ReadingReport, *, spent_s: float, num_cores: int, on_gpu: bool) -> str | None:
    """What to tell a user whose training waited for data; none where it hardly did. `num_cores` is what we may use."""
    if reading.held_up_share < TOLD_SHARE or reading.held_up_share * spent_s < TOLD_S:
        return None
    line = f"reading held the trainer up for {reading.held_up_share:.0%} of the time"
    line += _remedy(reading, num_cores=num_cores, on_gpu=on_gpu)
    if reading.idle_share >= IDLE_SHARE:
        line += f". For another {reading.idle_share:.0%} the GPU waited until steps were started: larger batches keep it busier"
    return line


def _remedy(reading: ReadingReport, *, num_cores: int, on_gpu: bool) -> str:
    """What would have helped, as far as the figures tell."""
    used, needed = _cores(reading.cores_used), _cores(reading.cores_needed)
    here = f"{num_cores} {'is' if num_cores == 1 else 'are'} here"
    wants = f": it used {used} cores, and about {needed} "
    wants += "would keep this GPU busy" if on_gpu else "beside those that train would keep up"
    if reading.thread_share >= BUSY_SHARE:
        return f"{wants}, but one thread hands over the batches and is busy all the time"
    if on_gpu and reading.cores_used < SPREAD_SHARE * num_cores:
        return (
            f", but used only {used} of the {num_cores} cores, so that more alone would not help (about {needed} at work would keep this "
            "GPU busy): files come too slowly, `data.parquet.decode_threads` is too low, row groups are few, or others use the cores"
        )
    if reading.cores_needed > num_cores:
        return f"{wants} ({here}); fewer features or a lower `max_ids` help too"
    if on_gpu:
        return f"{wants} ({here})"
    return f"{wants} ({here}, and training uses {'it' if num_cores == 1 else 'them'} too)"


def _cores(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{math.ceil(number):,}"
