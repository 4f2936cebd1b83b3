"""What the host does for a step before any arithmetic: it puts the batch together, and dispatches operators."""

from __future__ import annotations

from rowstead.plan.setup import Setup
from rowstead.plan.work import StepWork
from rowstead.spec.machine import Software


def hand_over_s(work: StepWork, software: Software, setup: Setup, *, has_devices: bool) -> float:
    """Host time until a batch is ready for its devices: put together once for each program that dispatches."""
    fixed = software.device_step_s if has_devices else software.host_step_s
    columns = software.operator_s * software.operators_per_column * work.num_dense
    num_devices = setup.num_devices if software.one_dispatcher else 1
    return fixed + columns + software.sample_s * setup.batch_size * num_devices


def table_operators(software: Software, setup: Setup, *, num_on_devices: int, num_off_devices: int) -> float:
    """Operators of a server for its tables; of a remote table only the two that send ids and gradients are left to it."""
    each = software.operators_per_table
    of_far = min(2.0, each) if setup.place == "remote" else each
    # a table that is not on devices is read for each device's batch
    return each * num_on_devices + of_far * num_off_devices * setup.num_devices


def launches_s(
    work: StepWork, software: Software, setup: Setup, *, num_on_devices: int, num_off_devices: int, through_host: bool
) -> float:
    """Host time to launch the kernels of a step: of all devices where one program launches, else of one device."""
    num_devices = setup.num_devices
    of_dense = len(work.layers) * software.operators_per_layer + software.operators_fixed
    of_tables = table_operators(software, setup, num_on_devices=num_on_devices, num_off_devices=num_off_devices)
    crossings = 2 if through_host else 1  # up to the host and down again
    exchanged = 2 * crossings * num_on_devices * (num_devices - 1) * software.operators_per_exchange
    launches = num_devices * of_dense + of_tables + exchanged
    return software.operator_s * (launches if software.one_dispatcher else launches / num_devices)
