"""A measured curve: seconds of one operation by its sizes, interpolated between the measured sizes."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from rowstead.spec.errors import require


@dataclass(frozen=True, kw_only=True)
class CurveAxis:
    """One size that an operation's time depends on."""

    name: str
    """What it counts."""
    sizes: tuple[float, ...]
    """Measured sizes, ascending."""
    grows: bool = True
    """Whether time grows in proportion beyond the largest size; otherwise it is constant."""

    def __post_init__(self) -> None:
        require(bool(self.sizes), "sizes", "give at least one")
        rising = (
            all(low < high for low, high in itertools.pairwise(self.sizes)) and self.sizes[0] > 0 and self.sizes[-1] < math.inf
        )
        require(rising, "sizes", "must be above 0, finite, distinct and ascending")

    def between(self, size: float) -> tuple[int, int, float]:
        """Indices of the measured sizes around `size`, and its position between them on a log scale, 0 to 1."""
        right = bisect.bisect_left(self.sizes, size)
        if right == 0:
            return 0, 0, 0.0
        if right == len(self.sizes):
            return right - 1, right - 1, 0.0
        low, high = self.sizes[right - 1], self.sizes[right]
        return right - 1, right, math.log(size / low) / math.log(high / low)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of one operation, measured at every combination of some sizes.

    Interpolates linearly between logarithms of sizes and times; below the smallest size, time is constant.
    """

    axes: tuple[CurveAxis, ...]
    """The sizes, in order."""
    seconds: tuple[float, ...]
    """One per combination, the last axis varying fastest."""

    def __post_init__(self) -> None:
        wanted = math.prod(len(axis.sizes) for axis in self.axes)
        require(
            len(self.seconds) == wanted,
            "seconds",
            f"expected {wanted} times, one per combination of sizes, got {len(self.seconds)}",
        )
        require(all(0 < one < math.inf for one in self.seconds), "seconds", "must be above 0 and finite")

    def at(self, *sizes: float) -> float:
        """Seconds at some sizes, in the order of the axes."""
        assert len(sizes) == len(self.axes)
        sides = [axis.between(size) for axis, size in zip(self.axes, sizes, strict=True)]
        total = 0.0
        for corner in itertools.product((0, 1), repeat=len(sides)):
            weight, index = 1.0, 0
            for axis, (low, high, share), bit in zip(self.axes, sides, corner, strict=True):
                weight *= share if bit else 1 - share
                index = index * len(axis.sizes) + (high if bit else low)
            if weight:
                total += weight * math.log(self.seconds[index])
        beyond = [size / axis.sizes[-1] for axis, size in zip(self.axes, sizes, strict=True) if axis.grows]
        return math.exp(total) * math.prod(one for one in beyond if one > 1)
