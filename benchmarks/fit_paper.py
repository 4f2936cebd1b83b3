"""Fits one constant of the software `operators-2020` to the sweep of the HPCA 2021 study, and again with parts of it left out.

The data are the twelve cells of the sweep over dense and sparse features. The production models and the placements are not seen. The
time of an operator is not fitted: it and the fixed time of a step stand in for each other in all cells but those with few features, so
that a fit of both says little of cells that it has not seen.

python -m benchmarks.fit_paper            print what is found
python -m benchmarks.fit_paper --save     also write benchmarks/paper_fit.json; copy `all` to rowstead/machines/software/
"""

from __future__ import annotations

import argparse
import json
import math

from benchmarks.paper import FIG10, FITS, SPARSE, cell, refitted
from rowstead.spec.catalogue import load_software
from rowstead.spec.software import Software

CONSTANTS = {"device_step_s": 5e-3}
"""What is fitted, and where the search starts."""


def errors(software: Software, left_out: str | None) -> list[float]:
    """ln(predicted / paper) of each cell but those of the row or column that is left out."""
    return [
        math.log(cell(row, column, software)["gpu_over_cpu_throughput"] / FIG10[row][column])
        for row in FIG10
        for column in SPARSE
        if left_out not in (f"row {row}", f"column {column}")
    ]


def loss(software: Software, left_out: str | None) -> float:
    """The root of the mean square error: smooth, and those that are far off weigh more."""
    found = errors(software, left_out)
    return math.sqrt(sum(one * one for one in found) / len(found))


def fit(software: Software, left_out: str | None = None, *, shortest_step: float = 0.005) -> dict[str, float]:
    """The constants of least loss, found by steps along each axis in the logarithm, which shrink where none helps."""
    now = dict(CONSTANTS)
    least = loss(refitted(software, now), left_out)
    steps = dict.fromkeys(now, 0.4)
    while max(steps.values()) > shortest_step:
        for name in now:
            for direction in (1, -1):
                tried = {**now, name: now[name] * math.exp(direction * steps[name])}
                if (found := loss(refitted(software, tried), left_out)) < least - 1e-6:
                    now, least = tried, found
                    steps[name] *= 1.2
                    break
            else:
                steps[name] *= 0.5
    return {name: float(f"{value:.3g}") for name, value in now.items()}


def main() -> None:
    """Fit on everything, then without each row and each column."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write {FITS.name}")
    options = parser.parse_args()
    software = load_software("operators-2020")
    found = {"all": fit(software)}
    print("all", found["all"], flush=True)
    parts = [f"row {row}" for row in FIG10] + [f"column {column}" for column in SPARSE]
    left_out = {}
    for part in parts:
        left_out[part] = fit(software, part)
        print("without", part, left_out[part], flush=True)
    if options.save:
        FITS.write_text(json.dumps({**found, "left_out": left_out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
