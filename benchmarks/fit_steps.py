"""How near do the overheads that we ship for this trainer come to the steps that `python -m benchmarks.step` measured?

These constants, in rowstead/machines/software/rowstead.yaml, stand for machines that nobody has calibrated. Those that are fitted are
chosen from a coarse grid by least squares of ln(predicted / measured), over the steps in the newest files under benchmarks/results/: six
on an H200, and three on a CPU, whose machine is described by what the same command measured of it (cores, copies, a large product) and
otherwise as the laptop of the catalogue.

python -m benchmarks.fit_steps          print predicted and measured steps
python -m benchmarks.fit_steps --fit    also look for better constants
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.step import Model, models_for
from rowstead.plan.predict import predict
from rowstead.plan.setup import Setup
from rowstead.plan.work import StepWork, step_work
from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.machine import Machine
from rowstead.spec.software import Software

GRID = {
    "cuda": {"device_gemm_share": (0.35, 0.4, 0.45, 0.5), "device_random_share": (0.8, 0.9, 1.0)},
    "cpu": {"cpu_gemm_share": (0.5, 0.6, 0.7, 0.8, 0.9), "cpu_random_share": (0.5, 0.7, 0.85, 1.0)},
}
SHARED = {"grouping_bytes_per_id": (0.0, 100.0, 200.0, 500.0)}
"""Fitted with the GPU's."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One step: what it asks for, on which machine, and how long it took."""

    name: str
    work: StepWork
    machine: Machine
    batch_size: int
    precision: str
    step_s: float

    def ratio(self, software: Software) -> float:
        """Predicted over measured."""
        setup = Setup(placement="device", batch_size=self.batch_size, has_input=False)
        found = predict(self.work, self.machine, software, setup, precision=self.precision)  # type: ignore[arg-type]
        return found.step_s / self.step_s


def measured_steps(device: str) -> list[Measured]:
    """The steps of the newest results, those in BF16 left out."""
    result: dict[str, Any] = json.loads(max(RESULTS.glob(f"step-{device}-*.json")).read_text())
    taken = {row["shape"]: row["rowstead_ms"] / 1e3 for row in result["rows"] if row["precision"] == "fp32"}
    machine = load_machine("h200") if device == "cuda" else _cpu(result)
    precision = "tf32" if device == "cuda" else "fp32"  # as that command trains
    return [
        Measured(model.name, work_of(model), machine, model.shape.batch_size, precision, taken[model.name])
        for model in models_for(device)
        if model.name in taken
    ]


def work_of(model: Model) -> StepWork:
    """What a step asks for whose ids are drawn as `rows * u**3`, which is a density of x^(-2/3), as many in every bag."""
    spec, shape = model.spec(), model.shape
    assert spec.data.synth is not None
    synth = dataclasses.replace(
        spec.data.synth,
        num_ids=shape.num_rows,
        mean_ids=float(spec.data.synth.mean_ids),  # type: ignore[arg-type]
        length_power=0.0,
        lengths="fixed",
        skew=2 / 3,
    )
    sparse = tuple(dataclasses.replace(one, hash="modulo") for one in spec.features.sparse)
    features = dataclasses.replace(spec.features, sparse=sparse)
    return step_work(dataclasses.replace(spec, data=dataclasses.replace(spec.data, synth=synth), features=features))


def _cpu(result: dict[str, Any]) -> Machine:
    rates, facts = result["summary"], result["machine"]
    changes = (
        f"host.num_cores={facts['num_cores']}",
        f"host.memory.bandwidth={rates['copy_bytes_per_s']}",
        f"host.compute.fp32={rates['operations_per_s_fp32']}",
    )
    return load_machine("laptop", changes)


def loss(steps: Sequence[Measured], software: Software) -> float:
    """The root of the mean square error of the logarithm."""
    return math.sqrt(sum(math.log(step.ratio(software)) ** 2 for step in steps) / len(steps))


def fitted(device: str, software: Software) -> dict[str, float]:
    """The constants of a device of least loss."""
    steps = measured_steps(device)
    grid = GRID[device] | (SHARED if device == "cuda" else {})
    tried = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return min(tried, key=lambda one: loss(steps, dataclasses.replace(software, **one)))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="also look for better constants")
    options = parser.parse_args()
    software = load_software("rowstead")
    for device in ("cuda", "cpu"):
        for step in measured_steps(device):
            ratio = step.ratio(software)
            print(
                f"{device:5} {step.name:10} measured {step.step_s * 1e3:7.2f} ms, predicted {ratio * step.step_s * 1e3:7.2f} ms: {ratio:.2f}"
            )
        if options.fit:
            found = fitted(device, software)
            software = dataclasses.replace(software, **found)  # type: ignore[arg-type]
            print(f"{device:5} best: {found}, loss {loss(measured_steps(device), software):.3f}")


if __name__ == "__main__":
    main()
