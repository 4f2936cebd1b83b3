"""How long the rest of a study takes, from how long its points took so far."""

from __future__ import annotations

from collections.abc import Sequence

LINE_POINTS = 3
"""Points that it takes to tell a fixed part from one that grows."""


def remaining_s(done: Sequence[tuple[float | None, float]], left: Sequence[float | None]) -> float | None:
    """Seconds that the points that are left will take; none before the first has ended.

    `done` has, of each point that ended, what was expected of its training and what it took with all around it; `left` what is
    expected of the others. What a point takes is a fixed part, the start of its process, and a multiple of what was expected; both
    are fitted to the points that ended. Where nothing is expected of some, or all are expected to take the same, the mean counts.
    """
    if not done:
        return None
    spent = [taken for _, taken in done]
    mean = sum(spent) / len(spent)
    known = [(expected, taken) for expected, taken in done if expected is not None]
    fixed, factor = _line(known) if len(known) >= LINE_POINTS else (mean, 0.0)
    return sum(mean if expected is None else fixed + factor * expected for expected in left)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares with neither part below zero."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 1e-12 * max(1.0, mean_x * mean_x):
        return mean_y, 0.0
    factor = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    if factor <= 0:
        return mean_y, 0.0
    fixed = mean_y - factor * mean_x
    if fixed >= 0:
        return fixed, factor
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
