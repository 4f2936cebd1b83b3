"""What the host does for a step before any arithmetic: it puts the batch together, and dispatches operators."""

from __future__ import annotations

from rowstead.plan.setup import Setup
from rowstead.plan.work import StepWork
from rowstead.spec.software import Software


def hand_over_s(work: StepWork, software: Software, setup: Setup, *, has_devices: bool) -> float:
    """Host time until a batch is ready for its devices: put together once for each program that dispatches."""
    fixed = software.device_step_s if has_devices else software.host_step_s
    columns = software.operator_s * software.operators_per_column * work.num_dense
    num_devices = setup.num_devices if software.one_dispatcher else 1
    return fixed + columns + software.sample_s * setup.batch_size * num_devices


def cpu_operators_s(software: Software, setup: Setup, *, num_remote: int) -> float:
    """Time of a CPU's cores for operators that are not counted with the work they do, as those of layers and of own tables are."""
    return software.operator_s * (software.operators_fixed + far_operators(software, setup) * num_remote)


def far_operators(software: Software, setup: Setup) -> float:
    """Operators for a table that is not on devices; of a remote one only the two that send ids and gradients are left to a trainer."""
    return min(2.0, software.operators_per_table) if setup.place == "remote" else software.operators_per_table


def launches_s(
    work: StepWork, software: Software, setup: Setup, *, num_on_devices: int, num_off_devices: int, through_host: bool
) -> float:
    """Host time to launch the kernels of a step: of all devices where one program launches, else of one device."""
    num_devices, num_here = setup.num_devices, num_on_devices / setup.num_in_step
    of_dense = len(work.layers) * software.operators_per_layer + software.operators_fixed
    # a table that is not on devices is read for each device's batch
    of_tables = software.operators_per_table * num_here + far_operators(software, setup) * num_off_devices * num_devices
    crossings = 2 if through_host else 1  # up to the host and down again
    num_others = num_devices * setup.num_in_step - 1
    exchanged = 2 * crossings * num_here * num_others * software.operators_per_exchange
    launches = num_devices * of_dense + of_tables + exchanged
    return software.operator_s * (launches if software.one_dispatcher else launches / num_devices)
