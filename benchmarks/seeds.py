"""What benchmarks of quality have in common: several seeds, and what their figures say together."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.harness import arguments
from rowstead.records.studies import interval

NUM_SEEDS = 5


def seed_arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark over seeds."""
    parser = arguments(description)
    parser.add_argument("--seeds", type=int, default=None, choices=range(1, 11), help=f"how many seeds [{NUM_SEEDS}, quick: 1]")
    return parser


def seeds_of(options: argparse.Namespace) -> range:
    """The seeds that were asked for."""
    return range(1, (options.seeds or (1 if options.quick else NUM_SEEDS)) + 1)


def over_seeds(key: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of a figure, and Student's 95 % interval around it where there are several seeds."""
    low, high = interval(values)
    found = {f"{key}_mean": statistics.fmean(values)}
    return found if low is None or high is None else found | {f"{key}_low": low, f"{key}_high": high}
