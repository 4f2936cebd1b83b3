"""A step as a schedule: tasks on resources, its critical path, and the resources that limit it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from rowstead.spec.phases import Phase


@dataclass(frozen=True)
class Task:
    """Something that one resource does in a step."""

    name: str
    phase: Phase
    resource: str
    seconds: float
    _: KW_ONLY
    after: tuple[str, ...] = ()
    """Names of the tasks that must end first; names that are not in this step are ignored."""
    hidden: bool = False
    """Whether it overlaps with other steps, as prefetching does: it occupies its resource but is not on the step's path."""
    busy_s: float | None = None
    """Seconds that its resource is busy per step, if not `seconds`: a server that answers several trainers is busy for longer."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """When a task of one step begins and ends."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """A resource, and the share of the step that would be saved if it were twice as fast."""

    resource: str
    saved_share: float


def lay_out(tasks: Sequence[Task]) -> list[Slot]:
    """Schedule one step: each task starts when its predecessors have ended and its resource is free, in the order given."""
    shown = {task.name for task in tasks if not task.hidden}
    free: dict[str, float] = defaultdict(float)
    ended: dict[str, float] = {}
    slots = []
    for task in tasks:
        if task.hidden:
            continue
        late = [name for name in task.after if name in shown and name not in ended]
        assert not late, f"`{task.name}` is listed before its predecessors {late}"
        start = max([free[task.resource], *(ended[name] for name in task.after if name in ended)])
        end = start + task.seconds
        free[task.resource] = ended[task.name] = end
        slots.append(Slot(task=task, start_s=start, end_s=end))
    return slots


def overlapped(tasks: Sequence[Task], *, in_flight: int = 1) -> list[Slot]:
    """The hidden tasks of resources that are busy for longer than the step's path, after what those do within the step."""
    slots, busy = lay_out(tasks), busy_s(tasks)
    longest = max((slot.end_s for slot in slots), default=0.0) / in_flight
    whole = period_s(tasks, in_flight=in_flight)
    free: dict[str, float] = defaultdict(float)
    free |= {slot.task.resource: slot.end_s for slot in slots}
    found = []
    for task in tasks:
        seconds = task.seconds if task.busy_s is None else task.busy_s
        if task.hidden and seconds and longest < busy[task.resource] == whole:
            start = free[task.resource]
            free[task.resource] = start + seconds
            found.append(Slot(task=task, start_s=start, end_s=start + seconds))
    return found


def busy_s(tasks: Sequence[Task]) -> dict[str, float]:
    """Seconds that each resource is busy per step, hidden tasks included."""
    busy: dict[str, float] = defaultdict(float)
    for task in tasks:
        busy[task.resource] += task.seconds if task.busy_s is None else task.busy_s
    return dict(busy)


def period_s(tasks: Sequence[Task], *, in_flight: int = 1) -> float:
    """Seconds from one step to the next with `in_flight` concurrent steps.

    This is the critical path of a step divided by the steps in flight, or the busy time of the busiest resource if that is longer.
    """
    longest = max((slot.end_s for slot in lay_out(tasks)), default=0.0)
    return max(longest / in_flight, *busy_s(tasks).values(), 0.0)


def faster(tasks: Sequence[Task], resources: Collection[str], factor: float) -> list[Task]:
    """The same tasks with the times of some resources multiplied by `factor`."""
    return [
        replace(task, seconds=task.seconds * factor, busy_s=None if task.busy_s is None else task.busy_s * factor)
        if task.resource in resources
        else task
        for task in tasks
    ]


def bottlenecks(tasks: Sequence[Task], *, in_flight: int = 1) -> tuple[Bottleneck, ...]:
    """Resources in the order in which they limit a step: the first, then what limits it once that one costs nothing, and so on."""
    found: list[Bottleneck] = []
    rest = sorted({task.resource for task in tasks})
    without = list(tasks)
    while rest and (now := period_s(without, in_flight=in_flight)) > 0:
        halved = {name: now - period_s(faster(without, [name], 0.5), in_flight=in_flight) for name in rest}
        name = max(rest, key=lambda one: (halved[one], busy_s(without)[one]))
        found.append(Bottleneck(resource=name, saved_share=halved[name] / now))
        rest.remove(name)
        without = faster(without, [name], 0.0)
    return tuple(found)
