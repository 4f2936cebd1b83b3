"""Measures this machine as a `Machine` file: memory, FLOPS, links, disk, power, and the time of each part of a training step.

Each part is measured separately over a grid of sizes; whole steps then calibrate what the parts do not explain.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from rowstead.plan.cost import device_processor, host_processor
from rowstead.records.usage import free_host_bytes, machine_facts
from rowstead.spec.catalogue import load_software
from rowstead.spec.machine import Accelerators, Compute, Host, Machine, Memory, PeerLink, RandomRate
from rowstead.spec.sharing import Sharing
from rowstead.spec.software import Software
from rowstead.spec.timings import LayerTimes, Timings
from rowstead.study.calibration import hardware
from rowstead.study.calibration.caches import measure_caches
from rowstead.study.calibration.clock import FLUSH_BYTES, Clock
from rowstead.study.calibration.compiling import compile_interactions
from rowstead.study.calibration.dense import fp32_interaction_factor, measure_dense_update, measure_interaction, measure_layers
from rowstead.study.calibration.exchange import measure_exchange
from rowstead.study.calibration.fit import fit_timings, take_shorter
from rowstead.study.calibration.footprint import measure_base_bytes
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.study.calibration.requests import measure_requests
from rowstead.study.calibration.rows import measure_rows
from rowstead.study.calibration.steps import Shape, Steps, StepTime

TINY = Shape(16, 4, 256, 1000, 16, 1, 1.0, (16,), (16,), "tf32")
"""A model so small that its steps on a GPU take only host time."""

SHAPES_PER_ROUND = 3
"""Whole models measured after each part."""
MAX_ONE_THREAD_EXAMPLES = 1024
"""The largest batch for which layers are measured with one thread."""

OnMessage = Callable[[str], Any]


def whole_shapes(device: torch.device, *, is_short: bool) -> list[Shape]:
    """Return the models whose whole steps are measured: few and many features, short and long bags, small and large batches."""
    on_gpu = device.type == "cuda"
    more, precision = (8, "tf32") if on_gpu else (1, "fp32")
    shapes = [
        # dense, sparse, batch, rows, width, ids, skew, MLPs
        Shape(64, 8, 256, 50_000, 32, 4, 0.8, (256, 128), (256,)),
        Shape(1024, 4, 512, 20_000, 16, 1, 0.0, (512, 512), (512, 256)),
        Shape(128, 48, 256, 30_000, 64, 8, 1.1, (128,), (256, 64)),
        Shape(256, 16, 1024, 100_000, 32, 16, 0.5, (256,), (128,)),
        Shape(2048, 24, 256, 15_000, 128, 2, 1.0, (256, 256), (512, 512)),
        Shape(512, 96, 128, 10_000, 16, 12, 0.9, (64, 64), (128, 128)),
        Shape(96, 12, 2048, 30_000, 64, 3, 0.3, (128,), (64, 64)),
        Shape(64, 24, 128, 200_000, 16, 2, 0.6, (64,), (64,)),
        Shape(768, 6, 1024, 60_000, 128, 5, 0.4, (1024, 256), (256,)),
        Shape(3072, 32, 512, 20_000, 32, 6, 0.7, (512,), (1024, 128)),
        Shape(160, 64, 512, 50_000, 32, 1, 1.2, (256, 256, 128), (512, 256, 128)),
        Shape(1536, 10, 128, 120_000, 64, 24, 0.2, (1024, 512), (1024,)),
        Shape(200, 40, 1024, 40_000, 16, 20, 0.8, (512, 128), (256, 256)),
        Shape(320, 5, 256, 100_000, 32, 1, 0.5, (1024, 1024), (512,)),
    ]
    if on_gpu:  # the vectors and widths of the parts: any other pair would compile more kernels, which takes seconds
        shapes = [
            Shape(64, 15, 256, 50_000, 16, 8, 0.8, (256, 128), (256,)),
            Shape(1024, 4, 512, 20_000, 128, 1, 0.0, (512, 512), (512, 256)),
            Shape(128, 64, 256, 30_000, 128, 8, 1.1, (128,), (256, 64)),
            Shape(256, 15, 1024, 100_000, 16, 16, 0.5, (256,), (128,)),
            Shape(2048, 15, 256, 40_000, 128, 1, 1.0, (256, 256), (512, 512)),
            Shape(512, 127, 128, 10_000, 16, 12, 0.9, (64, 64), (128, 128)),
            Shape(96, 4, 2048, 30_000, 128, 8, 0.3, (128,), (64, 64)),
            Shape(768, 31, 512, 80_000, 64, 20, 0.2, (1024, 256), (512,)),
            Shape(200, 63, 1024, 60_000, 64, 2, 0.7, (256,), (256, 256)),
            Shape(128, 32, 2048, 40_000, 16, 4, 1.2, (512, 128), (1024, 128)),
        ]
    if is_short:
        shapes = shapes[:3]
    return [
        dataclasses.replace(shape, batch_size=shape.batch_size * more, num_rows=shape.num_rows * more, precision=precision)
        for shape in shapes
    ]


def calibrate(
    device: torch.device, *, name: str, folder: Path, is_short: bool = False, on_message: OnMessage = lambda line: None
) -> Machine:
    """Measure this machine with the current number of torch threads; `folder` is on the disk to measure."""
    source = f"measured by `rowstead calibrate` on {datetime.date.today().isoformat()}, torch {torch.__version__}"
    on_message("memory bandwidth and FLOPS of the CPU")
    cpu = torch.device("cpu")
    machine = Machine(
        name=name,
        title=_title(device),
        host=_measure_host(Clock(cpu), source),
        disk=hardware.measure_disk(folder, source),
    )
    if device.type == "cuda":
        on_message("memory bandwidth, FLOPS and host link of the GPU")
        machine = dataclasses.replace(machine, accelerators=_measure_accelerators(Clock(device), source))
    speed = MachineSpeed() if device.type == "cpu" else None
    whole = _WholeSteps(device, speed, is_short=is_short, on_message=on_message)
    timings = _measure_timings(device, is_short=is_short, on_message=on_message, between=whole.measure_some)
    machine = _add_random_rates(machine, timings)
    software = _software(device, timings, source)
    if not is_short:
        on_message("messages between two processes")
        software = dataclasses.replace(software, exchange=measure_exchange())
    if device.type == "cpu":
        on_message("memory of a training process")
        software = dataclasses.replace(software, base_bytes=measure_base_bytes(torch.get_num_threads()))
    software, one_thread = whole.fit_software(machine, software)
    if speed is not None and one_thread is not None:
        on_message("processes that share cores, as in a fleet")
        software = dataclasses.replace(software, sharing=_measure_sharing(one_thread, speed, is_short=is_short))
    on_message("row caches")
    software = measure_caches(machine, software, device, folder, speed, is_short=is_short)
    on_message("power")
    assert whole.last is not None
    machine = dataclasses.replace(machine, meter=hardware.measure_power(device, whole.last.measure, source))
    return dataclasses.replace(machine, software=software)


def _title(device: torch.device) -> str:
    facts = machine_facts(torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    kind = facts.get("gpu") or facts.get("cpu") or platform.machine()
    num_threads = torch.get_num_threads()
    return f"{kind}, {num_threads} thread{'' if num_threads == 1 else 's'}"


def _measure_memory(clock: Clock, capacity_bytes: float, source: str) -> Memory:
    """Measure sequential bandwidth; the row times add the random-access rates."""
    kind = clock.device.type
    in_order = hardware.measure_copy_bytes_per_s(clock, hardware.COPY_BYTES[kind])
    cached = hardware.measure_copy_bytes_per_s(clock, hardware.CACHED_BYTES[kind])
    return Memory(
        capacity_bytes=capacity_bytes,
        bandwidth_bytes_per_s=in_order,
        random=(RandomRate(piece_bytes=64, bytes_per_s=in_order),),
        line_bytes=64 if kind == "cpu" else 32,
        cache_bytes=hardware.cache_bytes(clock.device),
        cache_bandwidth_bytes_per_s=max(cached, in_order),
        source=f"{source}; cache sizes as reported by the system",
    )


def _measure_host(clock: Clock, source: str) -> Host:
    memory = _measure_memory(clock, float(psutil.virtual_memory().total), source)
    with hardware.use_threads(1):
        one_core = hardware.measure_copy_bytes_per_s(clock, hardware.COPY_BYTES["cpu"])
    return Host(
        num_cores=torch.get_num_threads(),
        memory=memory,
        compute=Compute(fp32_flops_per_s=hardware.measure_flops_per_s(clock, "fp32"), source=source),
        core_share=min(1.0, one_core / memory.bandwidth_bytes_per_s),
    )


def _measure_accelerators(clock: Clock, source: str) -> Accelerators:
    num = torch.cuda.device_count()
    total = float(torch.cuda.get_device_properties(clock.device).total_memory)
    peer = None
    if num > 1:
        link = hardware.measure_peer_link(source)
        peer = PeerLink(
            topology="switched", bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s, source=link.source
        )
    return Accelerators(
        num=num,
        memory=_measure_memory(clock, total, source),
        compute=Compute(
            fp32_flops_per_s=hardware.measure_flops_per_s(clock, "fp32"),
            tf32_flops_per_s=hardware.measure_flops_per_s(clock, "tf32"),
            bf16_flops_per_s=hardware.measure_flops_per_s(clock, "bf16"),
            source=source,
        ),
        host_link=hardware.measure_host_link(clock.device, source),
        peer_link=peer,
    )


def _measure_timings(
    device: torch.device, *, is_short: bool, on_message: OnMessage, between: Callable[[], Any] = lambda: None
) -> Timings:
    """Measure each part of a step separately; `between` is called between parts."""
    on_gpu = device.type == "cuda"
    clock = Clock(device, budget_s=0.004 if is_short else 0.02 if on_gpu else 0.006, least_calls=5 if on_gpu else 3)
    among = dataclasses.replace(clock, flush_bytes=FLUSH_BYTES, least_calls=9 if on_gpu and not is_short else 5)
    formats = ("fp32", "tf32", "bf16")[: 2 if is_short else 3] if on_gpu else ("fp32",)

    def often(measure: Callable[[], Any]) -> Any:
        """On a CPU, take the shorter of two times: other processes come and go within seconds, and only ever slow it down."""
        if on_gpu or is_short:
            return measure()
        first = measure()
        between()
        return take_shorter(first, measure())

    layers = []
    for precision in formats:
        on_message(f"linear layers, {precision}")
        layers.append(often(functools.partial(measure_layers, clock, precision, is_short=is_short)))
        between()
    multiplied = "tf32" if clock.is_cuda else "fp32"
    if clock.is_cuda and not is_short:
        on_message("interaction: compiling its kernels")
        compile_interactions()
    on_message("interaction")
    forward, back = measure_interaction(clock, multiplied, is_short=is_short)
    fp32_factor = fp32_interaction_factor(clock, multiplied) if clock.is_cuda else 1.0
    on_message("dense optimizer")
    update = measure_dense_update(among)
    between()
    clock.free_memory()
    on_message("row lookup and update")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    rows = often(functools.partial(measure_rows, among, min(free, 1 << 27) if is_short else free, is_short=is_short))
    clock.free_memory()
    between()
    fresh_from = Timings.fresh_from_bytes
    return Timings(
        layers=tuple(layers),
        interaction_forward=forward,
        interaction_back=back,
        fp32_interaction_factor=fp32_factor,
        dense_update=update,
        **rows,
        fills_batch=clock.is_cuda,
        fresh_byte_s=0.0 if clock.is_cuda else hardware.fresh_byte_s(clock, fresh_from),
    )


def _add_random_rates(machine: Machine, timings: Timings) -> Machine:
    """Return the machine with random-access rates, from the rows read in the largest memory range."""
    on_gpu = machine.accelerators is not None
    memory = machine.accelerators.memory if machine.accelerators is not None else machine.host.memory
    within, widths = timings.read_row.axes[0].sizes[-1], timings.read_row.axes[1].sizes
    rates = tuple(
        RandomRate(
            piece_bytes=int(width),
            bytes_per_s=min(memory.bandwidth_bytes_per_s, memory.lines(width) / timings.read_row.at(within, width)),
        )
        for width in widths
    )
    changed = dataclasses.replace(memory, random=rates)
    if on_gpu and machine.accelerators is not None:
        return dataclasses.replace(machine, accelerators=dataclasses.replace(machine.accelerators, memory=changed))
    return dataclasses.replace(machine, host=dataclasses.replace(machine.host, memory=changed))


def _software(device: torch.device, timings: Timings, source: str) -> Software:
    """Return the shipped software description with measured times instead of operator counts."""
    on_gpu = device.type == "cuda"
    return dataclasses.replace(
        load_software("rowstead"),
        title="rowstead, measured on this machine",
        operator_s=0.0,
        operators_per_layer=0.0,
        operators_fixed=0.0,
        device_step_s=0.0,
        kernel_s=0.0,
        runs_ahead=on_gpu,
        cpu_timings=None if on_gpu else timings,
        device_timings=timings if on_gpu else None,
        source=source,
    )


class _WholeSteps:
    """Measures whole steps and fits the timings of the parts to them.

    On a CPU a few models are measured after each part, so that their median machine speed covers the whole calibration and not a few
    seconds. On a GPU the host time is measured before each model, for the same reason.
    """

    def __init__(self, device: torch.device, speed: MachineSpeed | None, *, is_short: bool, on_message: OnMessage) -> None:
        self._device, self._speed, self._is_short, self._on_message = device, speed, is_short, on_message
        self._seconds = 0.05 if is_short else 0.4
        self._shapes = whole_shapes(device, is_short=is_short)
        self._num_measured = 0
        self._times: list[tuple[Shape, StepTime]] = []
        self._one_thread: list[tuple[Shape, StepTime]] = []
        """Steps of one thread, with the slowdown of the steps just before: one-thread reference work does not show it."""
        self.last: Steps | None = None
        """The last model, still built."""

    def measure_some(self) -> None:
        """Measure a few models, on a CPU."""
        if self._speed is not None and not self._is_short:
            self._measure(SHAPES_PER_ROUND)

    def _measure(self, count: int) -> None:
        for shape in self._shapes[self._num_measured : self._num_measured + count]:
            self._num_measured += 1
            self._on_message(f"whole steps, {self._num_measured} of {len(self._shapes)} models")
            self.last = None  # free its memory first
            self.last = Steps.of(shape, self._device, speed=self._speed)
            time = self.last.measure(self._seconds)
            self._times.append((shape, time))
            if self._speed is not None and (self._is_short or self._num_measured % 2):  # every other one, to save time
                with hardware.use_threads(1):
                    self._one_thread.append(
                        (shape, dataclasses.replace(self.last.measure(self._seconds / 2), slowdown=time.slowdown))
                    )

    def fit_software(self, machine: Machine, software: Software) -> tuple[Software, Timings | None]:
        """Return the software with timings fitted to whole steps (on a GPU also the host time), and on a CPU the timings of one thread."""
        if self._speed is None:
            return self._fit_on_gpu(machine, software), None
        self._measure(len(self._shapes))
        processor = host_processor(machine, software)
        assert processor.timings is not None
        usual = statistics.median(time.slowdown for _, time in self._times)  # becomes 1
        self._speed.standard_s *= usual
        times, one_thread_times = (
            [(shape, dataclasses.replace(time, slowdown=time.slowdown / usual).at_standard_speed()) for shape, time in some]
            for some in (self._times, self._one_thread)
        )
        changed = fit_timings(processor.timings, processor, software, *zip(*times, strict=True))
        software = dataclasses.replace(software, cpu_timings=dataclasses.replace(changed, reference_s=self._speed.standard_s))
        one_thread = dataclasses.replace(processor.timings, layers=(self._measure_one_thread_layers(),))
        return software, fit_timings(one_thread, processor, software, *zip(*one_thread_times, strict=True))

    def _fit_on_gpu(self, machine: Machine, software: Software) -> Software:
        tiny, of_host = Steps.of(TINY, self._device), list[float]()
        while self._num_measured < len(self._shapes):
            of_host.append(tiny.measure(self._seconds / 4).step_s)
            self._measure(1)
        host_s = statistics.median(of_host)
        software = dataclasses.replace(software, device_step_s=host_s)
        # steps bound by the host say nothing about the GPU
        times = [(shape, time) for shape, time in self._times if time.step_s > 1.3 * host_s]
        if not times:
            return software
        processor = device_processor(machine, software)
        assert processor.timings is not None
        changed = fit_timings(processor.timings, processor, software, *zip(*times, strict=True))
        return dataclasses.replace(software, device_timings=changed)

    def _measure_one_thread_layers(self) -> LayerTimes:
        self._on_message("linear layers, one thread")
        clock = Clock(self._device, budget_s=0.004, least_calls=3)
        with hardware.use_threads(1):
            return measure_layers(clock, "fp32", is_short=self._is_short, most_examples=MAX_ONE_THREAD_EXAMPLES)


def _measure_sharing(one_thread: Timings, speed: MachineSpeed, *, is_short: bool) -> Sharing | None:
    """Combine one-thread timings with the costs of requests between processes; None if no other process can be started."""
    found = measure_requests(speed, is_short=is_short)
    if found is None:
        return None
    return Sharing(
        layers=one_thread.layers[0],
        dense=one_thread.dense,
        lookup=one_thread.lookup,
        update=one_thread.update,
        dense_optimizer=one_thread.dense_optimizer,
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
    )
