"""Host time of a step before any arithmetic: assembling the batch and dispatching operators."""

from __future__ import annotations

from rowstead.plan.setup import Setup
from rowstead.plan.work import StepWork
from rowstead.spec.software import Software


def assemble_batch_s(work: StepWork, software: Software, setup: Setup, *, has_devices: bool) -> float:
    """Host time to assemble batches, one per device of the process, column by column."""
    fixed = software.device_step_s if has_devices else software.host_step_s
    num_batches = setup.num_devices if software.one_dispatcher else 1
    return fixed + num_batches * software.operator_s * software.operators_per_column * work.num_dense


def cpu_operators_s(software: Software, setup: Setup, *, num_remote: int) -> float:
    """Time of a CPU's cores for operators that are not counted with their work; those of layers and local tables are."""
    return software.operator_s * (software.operators_fixed + far_operators(software, setup, has_devices=False) * num_remote)


def copies_per_table(software: Software) -> float:
    """Copies between host and device per table: ids and lengths, or pooled vectors and their gradients; 0 where tables share one."""
    return min(2.0, software.operators_per_table)


def far_operators(software: Software, setup: Setup, *, has_devices: bool) -> float:
    """Operators that a process launches per step and device for a table that is not on its devices.

    Two copy pooled vectors to the device and gradients back; for a remote table two more send ids and gradients. Those that read
    and update rows run on the host's cores.
    """
    return copies_per_table(software) * (has_devices + (setup.placement == "remote"))


def launches_s(
    work: StepWork, software: Software, setup: Setup, *, num_on_devices: int, num_off_devices: int, through_host: bool
) -> float:
    """Host time to launch the kernels of a step: of all devices where one process launches, else of one device."""
    num_devices, num_here = setup.num_devices, num_on_devices / setup.num_in_step
    of_dense = len(work.layers) * software.operators_per_layer + software.operators_fixed
    far = far_operators(software, setup, has_devices=True) * num_off_devices * num_devices
    crossings = 2 if through_host else 1  # to the host and back
    num_others = num_devices * setup.num_in_step - 1
    exchanged = 2 * crossings * num_here * num_others * software.operators_per_exchange
    launches = num_devices * of_dense + software.operators_per_table * num_here + far + exchanged
    return software.operator_s * (launches if software.one_dispatcher else launches / num_devices)
