"""The fleet that a recipe names, as the set-up of a plan on CPU servers."""

from __future__ import annotations

from collections.abc import Sequence

from rowstead.plan.choose import Choice, Prefer, choose
from rowstead.plan.predict import predict
from rowstead.plan.setups import SetupBuilder
from rowstead.plan.work import step_work
from rowstead.spec.machine import Machine
from rowstead.spec.run import RunSpec
from rowstead.spec.software import Software


def choose_for_recipe(
    spec: RunSpec,
    machine: Machine,
    software: Software,
    *,
    server: Machine,
    batch_sizes: Sequence[int] = (),
    samples_per_s: float | None = None,
    prefer: Prefer = "efficiency",
) -> Choice:
    """The recipe's own fleet on a machine without accelerators, unless a speed or batch sizes are asked for; else the best set-up."""
    found = choose(spec, machine, software, server=server, batch_sizes=batch_sizes, samples_per_s=samples_per_s, prefer=prefer)
    fleet = spec.scaled_fleet
    is_free = (
        machine.accelerators is not None
        or machine.network is None
        or server.network is None
        or samples_per_s is not None
        or bool(batch_sizes)
    )
    if is_free or fleet is None or fleet.tables != "remote":
        return found
    work = step_work(spec)
    (setup,) = SetupBuilder(spec=spec, work=work, machine=machine, server=server).build(
        "remote",
        batch_size=spec.train.batch_size,
        num_trainers=fleet.num_trainers,
        num_sparse_servers=fleet.num_sparse,
        num_dense_servers=fleet.num_dense,
    )
    own = predict(work, machine, software, setup, precision=spec.train.precision)
    others = tuple(one for one in (found.best, *found.others) if one is not None)
    return Choice(machine=machine, best=own, others=others) if own.fits else found
