"""Estimates how long the rest of a study takes from the points that have ended."""

from __future__ import annotations

from collections.abc import Sequence

LINE_POINTS = 3
"""Points needed to fit a fixed part and a factor."""


def remaining_s(done: Sequence[tuple[float | None, float]], left: Sequence[float | None]) -> float | None:
    """Seconds that the remaining points will take; None before the first has ended.

    `done` has the predicted training time and the wall time of each point that ended, `left` the predicted times of the others.
    A point takes a fixed time, the start of its process, plus a multiple of the prediction; both are fitted to the points that
    ended. Without predictions, or if all are the same, the mean is used.
    """
    if not done:
        return None
    spent = [taken for _, taken in done]
    mean = sum(spent) / len(spent)
    known = [(expected, taken) for expected, taken in done if expected is not None]
    fixed, factor = _line(known) if len(known) >= LINE_POINTS else (mean, 0.0)
    return sum(mean if expected is None else fixed + factor * expected for expected in left)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares with both coefficients at least zero."""
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
