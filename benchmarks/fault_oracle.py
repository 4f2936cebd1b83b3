"""What must hold of a disturbed run, by docs/reliability.md, docs/checkpoints.md and docs/distributed.md.

Every check returns findings and changes nothing, so that tests can show it a run with a planted fault.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.fault_recipe import BATCH_SIZE, NUM_STEPS
from benchmarks.fault_runs import Part, Result
from benchmarks.fault_schedules import roles_of
from rowstead.training import checkpoint

Category = Literal["unexplained loss", "wrong weights", "leftover", "hang", "wrong end"]

NE_WITHIN = 0.003
"""Relative tolerance of NE beside an undisturbed fleet, as docs/reliability.md states it for one role."""
NE_PER_LOST_SHARE = 0.2
"""What losing all updates of rows could cost on top, as a share of NE; a share of them costs that share of it."""
MAX_LOST_DENSE_SHARE = 0.1
"""Where more of the steps of dense parameters were lost, rows and dense parameters do not fit together, and NE may be anything."""
LOST_DENSE = "of dense parameters were lost"
STOPPED = {128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
DISK_WORDS = re.compile(r"disk full|disk is full|No space left|File too large|cannot (write|save|use)", re.IGNORECASE)
GIVES_UP = "giving up after 4 starts"


@dataclass(frozen=True)
class Finding:
    category: Category
    text: str


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The same run without faults."""

    weights: Mapping[str, Tensor]
    ne: float


def read_reference(out: Path) -> Reference:
    return Reference(weights=read_weights(out), ne=read_figures(out)["ne_expected"])


def read_weights(out: Path) -> dict[str, Tensor]:
    """The tensors of a run's newest checkpoint."""
    found = checkpoint.load_latest(out / "checkpoints", lambda text: None)
    return {name: found.tensors[name].clone() for name in found.tensors}


def read_figures(out: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads((out / "record.json").read_text())["figures"]
    return figures


def check(result: Result, reference: Reference) -> list[Finding]:
    """Everything that must hold of a disturbed run."""
    findings = [Finding("leftover", f"process {line}") for line in result.remaining]
    if result.hang is not None:
        return [*findings, Finding("hang", f"{result.hang}. The end of its output:\n{result.parts[-1].printed[-1500:]}")]
    findings += [finding for part in result.parts for finding in check_end(part)]
    findings += [Finding("leftover", text) for text in check_files(result.out, result.temporary)]
    mode = result.schedule.mode
    if mode == "fleet":
        return findings + check_fleet(result, reference)
    figures = read_figures(result.out)
    num_steps = NUM_STEPS[mode]
    findings += check_planned(figures, num_steps)
    return findings + check_weights(read_weights(result.out), reference.weights)


# Ends


def check_end(part: Part) -> list[Finding]:
    """Check that a part of a run ended as one of its faults explains, and said so."""
    assert part.code is not None
    code = 128 - part.code if part.code < 0 and -part.code in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) else part.code
    printed = part.printed
    findings = [Finding("wrong end", f"a traceback:\n{tail(printed)}")] if "Traceback" in printed else []
    if (problem := explain_end(part, code, printed)) is not None:
        findings.append(Finding("wrong end", f"{problem}:\n{tail(printed)}"))
    return findings


def explain_end(part: Part, code: int, printed: str) -> str | None:
    """Say what is wrong with an exit code; None if a fault explains it."""
    if code == 0:
        return None
    if code == -signal.SIGKILL:
        return None if signal.SIGKILL in part.sent else "killed by nobody"
    if code - 128 in part.sent:
        is_lost = "progress since the last checkpoint is lost" in printed and (bool(part.killed) or part.was_cut)
        is_saved = "the checkpoint is saved" in printed or "run: finished after" in printed or is_lost
        has_steps = re.search(r"step [1-9]", printed) is not None
        return (
            None if is_saved or not has_steps or part.disk_was_full else f"exit code {code} without a word about its checkpoint"
        )
    if code in STOPPED:
        return f"exit code {code}, but it was not sent that signal"
    if code == 2 and part.disk_was_full:
        return None if DISK_WORDS.search(printed) else "exit code 2 while the disk was full, but not for that reason"
    if code == 1 and GIVES_UP in printed:
        return None if printed.count(": restarting all") >= 3 else "gave up too early"
    return f"exit code {code} that no fault explains"


def tail(printed: str) -> str:
    return "\n".join(printed.rstrip().splitlines()[-12:])[-2000:]


# Files


def check_files(out: Path, temporary: Path) -> list[str]:
    """What a finished run has left behind that it should not have."""
    found = [f"in TMPDIR: {path.name}" for path in temporary.iterdir()]
    found += [f"in the run's folder: {path.relative_to(out)}" for path in out.rglob("*") if ".tmp" in path.name]
    checkpoints = [path.name for path in out.glob("checkpoints/*")]
    if unknown := [name for name in checkpoints if not name.startswith("step-")]:
        found.append(f"among the checkpoints: {', '.join(unknown)}")
    return found


# Weights


def check_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Finding]:
    """Check that two models are equal bit for bit."""
    if found.keys() != expected.keys():
        return [Finding("wrong weights", f"other tensors: {sorted(found.keys() ^ expected.keys())}")]
    different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    return [Finding("wrong weights", f"other weights than undisturbed: {', '.join(different)}")] if different else []


# Work that was done and lost


def check_planned(figures: Mapping[str, float], num_steps: int) -> list[Finding]:
    planned = {"num_steps": num_steps, "num_samples": num_steps * BATCH_SIZE}
    return [
        Finding("unexplained loss", f"{name} is {figures.get(name)}, and {count} were planned")
        for name, count in planned.items()
        if figures.get(name) != count
    ]


def check_fleet(result: Result, reference: Reference) -> list[Finding]:
    """Check that every planned batch is trained on, every done one applied or counted as lost, and that NE is as good."""
    out, part = result.out, result.parts[-1]
    figures, num_steps = read_figures(out), NUM_STEPS["fleet"]
    findings = check_planned(figures, num_steps)
    first_step, num_lost_before = position_before(part)
    servers = [last_sample(out / "roles" / f"{name}.jsonl") for name in roles_of(result.schedule.fleet) if "sparse" in name]
    findings += check_updates(
        [int(server.get("num_updates", 0)) for server in servers],
        num_lost=int(figures["num_lost_updates"]) - num_lost_before,
        num_steps=num_steps - first_step,
        num_repeated=int(figures["num_batches_repeated"]),
    )
    num_restarts, num_deaths = int(figures["num_restarts"]), len(part.killed)
    if num_restarts > num_deaths and not part.disk_was_full:
        findings.append(Finding("wrong end", f"{num_restarts} restarts, but {num_deaths} processes were killed: {part.killed}"))
    lost_share = figures["num_lost_updates"] / len(servers) / num_steps
    lost_dense_share = figures.get("num_lost_dense_steps", 0) / num_steps
    if lost_dense_share and LOST_DENSE not in part.printed.replace("\n", " "):
        findings.append(Finding("unexplained loss", "steps of dense parameters were lost without a word"))
    if lost_dense_share > MAX_LOST_DENSE_SHARE:
        return findings
    return findings + check_ne(figures["ne_expected"], reference.ne, lost_share)


def check_updates(updates: Sequence[int], *, num_lost: int, num_steps: int, num_repeated: int) -> list[Finding]:
    """Check `updates`, which each sparse server has applied: each must have had all steps, but for those that count as lost."""
    known, num_servers = sum(updates) + num_lost, len(updates)
    if known < num_servers * num_steps:
        text = f"servers applied {updates} of {num_steps} updates each, and {num_lost} count as lost: {num_servers * num_steps - known} are missing"
        return [Finding("unexplained loss", text)]
    if known > num_servers * (num_steps + num_repeated):
        text = f"servers applied {updates} updates, {num_lost} count as lost and {num_repeated} as repeated: more than {num_steps} steps"
        return [Finding("unexplained loss", text)]
    if any(count > num_steps + num_repeated for count in updates):
        return [Finding("unexplained loss", f"a server applied {updates} of {num_steps} updates: some twice")]
    return []


def check_ne(found: float, expected: float, lost_share: float) -> list[Finding]:
    """Check NE beside that of an undisturbed run, given the share of the updates that count as lost."""
    bound = expected * (1 + NE_WITHIN + NE_PER_LOST_SHARE * lost_share)
    if found <= bound:
        return []
    return [
        Finding("unexplained loss", f"NE {found:.5f}, undisturbed {expected:.5f}, with {lost_share:.1%} of the updates lost")
    ]


def position_before(part: Part) -> tuple[int, int]:
    """Where a part of a run began: the step of the checkpoint that it resumed from, and how many updates were lost by then."""
    found = re.search(r"resuming \S+ after step ([\d,]+)", part.printed.replace("\n", " "))
    step = 0 if found is None else int(found[1].replace(",", ""))
    return step, part.num_lost_updates_at.get(step, 0)


def last_sample(usage: Path) -> dict[str, Any]:
    """The last usage sample of a role."""
    return last_of(usage.read_text().splitlines())


def last_of(lines: Iterable[str]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # torn when its process was killed
            last = json.loads(line)
    return last
