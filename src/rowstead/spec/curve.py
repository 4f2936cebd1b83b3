"""A measured curve: seconds of one operation by its sizes, and what lies between the sizes that were measured."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from rowstead.spec.errors import require


@dataclass(frozen=True, kw_only=True)
class CurveAxis:
    """One size on which an operation's time depends."""

    name: str
    """What it counts."""
    sizes: tuple[float, ...]
    """At which it was measured, the smallest first."""
    grows: bool = True
    """Whether time grows in proportion beyond the largest; else it stays."""

    def __post_init__(self) -> None:
        require(bool(self.sizes), "sizes", "give at least one")
        rising = all(low < high for low, high in itertools.pairwise(self.sizes)) and 0 < self.sizes[0] < math.inf
        require(rising, "sizes", "give each once, above 0 and the smallest first")

    def between(self, size: float) -> tuple[int, int, float]:
        """The measured sizes on both sides of one, and how far it is from the first to the second, by logarithm."""
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

    Between them the logarithm of the time is interpolated over those of the sizes; below the smallest it stays.
    """

    axes: tuple[CurveAxis, ...]
    """The sizes, in order."""
    seconds: tuple[float, ...]
    """Of each combination, the last axis running fastest."""

    def __post_init__(self) -> None:
        wanted = math.prod(len(axis.sizes) for axis in self.axes)
        require(
            len(self.seconds) == wanted, "seconds", f"there are {wanted} combinations of sizes, and {len(self.seconds)} times"
        )
        require(all(0 < one < math.inf for one in self.seconds), "seconds", "must be above 0 and finite")

    def at(self, *sizes: float) -> float:
        """Seconds at some sizes, in the order of the axes."""
        assert len(sizes) == len(self.axes)
        sides = [axis.between(size) for axis, size in zip(self.axes, sizes, strict=True)]
        total = 0.0
        for corner in itertools.product((0, 1), repeat=len(sides)):
            weight, place = 1.0, 0
            for axis, (low, high, share), bit in zip(self.axes, sides, corner, strict=True):
                weight *= share if bit else 1 - share
                place = place * len(axis.sizes) + (high if bit else low)
            if weight:
                total += weight * math.log(self.seconds[place])
        beyond = [size / axis.sizes[-1] for axis, size in zip(self.axes, sizes, strict=True) if axis.grows]
        return math.exp(total) * math.prod(one for one in beyond if one > 1)
