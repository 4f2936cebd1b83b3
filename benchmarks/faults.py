"""What is lost when processes are killed, stopped or frozen, disks are full, and links are cut or slow?

python -m benchmarks.faults --minutes N [--seed S] [--schedules N] [--mode single|processes|fleet] [--json]

Runs random schedules of a few faults each: against a single process, two processes of one job (`--processes 2`), and local fleets; several victims
at once among them, the launcher, the fork server and the coordinator too. A run that ended is resumed until it has finished. Then must hold:

    weights    of a single process and of `--processes` are those of an undisturbed run, bit for bit
    losses     in a fleet every planned batch is done, every done one applied by every sparse server or counted in `num_lost_updates`, and NE
               within 0.3 % of the undisturbed one, or what the lost updates explain
    ends       every exit code and message is that of a fault; nobody is restarted who was not killed
    leftovers  no process, temporary file or socket is left

Each schedule is drawn from a seed of its own, S, S + 1 and so on; a failing one is printed with it, and drawn again by
`--seed THAT --schedules 1`. How its faults meet the run depends on the machine's speed all the same.

Small disks are tmpfs mounts, and TCP connections are closed by `ss -K`: for others than root, a limit on file sizes replaces the former for
single processes and jobs, and the rest is left out and counted under `skipped`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, get_args

from benchmarks.fault_oracle import Category, Finding, Reference, check, read_reference
from benchmarks.fault_runs import Result, disturbed
from benchmarks.fault_schedules import MODES, Schedule, draw_schedule
from benchmarks.harness import OtherLoad, arguments, publish

QUICK_SCHEDULES = 3
KEYS: dict[Category, str] = {
    "unexplained loss": "num_unexplained_losses",
    "wrong weights": "num_wrong_weights",
    "leftover": "num_leftovers",
    "hang": "num_hangs",
    "wrong end": "num_wrong_ends",
}


class References:
    """Undisturbed runs, each made when it is first needed, and kept in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def of(self, schedule: Schedule) -> Reference:
        kept = self._folder / "_".join(filter(None, (schedule.mode, schedule.training, schedule.fleet)))
        if not (kept / "record.json").exists():
            undisturbed = Schedule(seed=0, mode=schedule.mode, training=schedule.training, fleet=schedule.fleet, faults=())
            with disturbed(undisturbed) as result:
                if result.hang is not None or result.parts[-1].code:
                    raise SystemExit(f"an undisturbed run fails: {result.hang or ''}\n{result.parts[-1].printed}")
                with tempfile.TemporaryDirectory(dir=self._folder) as folder:  # another bench may make the same one
                    shutil.copytree(result.out, Path(folder) / kept.name, ignore=shutil.ignore_patterns("roles", "ballast"))
                    with contextlib.suppress(OSError):
                        (Path(folder) / kept.name).rename(kept)
        return read_reference(kept)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, metavar="N", help="start no schedule later than this")
    parser.add_argument("--schedules", type=int, metavar="N", help="run so many schedules")
    parser.add_argument("--seed", type=int, default=1, help="that of the first schedule; the next ones count on from it")
    parser.add_argument("--mode", choices=MODES, help="only runs of this kind: a schedule's seed then draws another one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the files of failing runs there")
    parser.add_argument(
        "--references", type=Path, metavar="FOLDER", help="keep undisturbed runs there, and use those that are there"
    )
    parser.add_argument("--warm", action="store_true", help="fork single processes and coordinators, which saves their imports")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_schedules(options, References(options.references or Path(folder)), parser.error)


def run_schedules(options: argparse.Namespace, references: References, refuse: Callable[[str], NoReturn]) -> None:
    most = options.schedules if options.schedules is not None else QUICK_SCHEDULES if options.quick else None
    if most is None and options.minutes is None:
        refuse("say how long: --minutes N, or --schedules N")
    faults, findings, skipped = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    schedules, parts = Counter[str](), Counter[str]()
    modes = MODES if options.mode is None else (options.mode,)
    started_s, number = time.monotonic(), 0
    with OtherLoad() as load:
        while (most is None or number < most) and _elapsed_min(started_s) < (options.minutes or float("inf")):
            schedule = draw_schedule(options.seed + number, modes=modes)
            number += 1
            took_s = time.monotonic()
            reference = references.of(schedule)
            with disturbed(schedule, is_warm=options.warm) as result:
                found = check_safely(result, reference)
                if found and options.keep is not None:
                    keep(result.temporary.parent, options.keep / f"seed-{schedule.seed}")
            schedules[schedule.mode] += 1
            parts[schedule.mode] += len(result.parts)
            faults.update((schedule.mode, fault.kind) for fault in result.injected)
            skipped.update(result.skipped)
            findings.update(finding.category for finding in found)
            verdict = f"{len(found)} FAILED" if found else "ok"
            seconds = time.monotonic() - took_s
            print(
                f"seed {schedule.seed}, {seconds:.0f} s, {len(result.injected)} faults, {verdict}: {schedule.describe()}",
                flush=True,
            )
            for finding in found:
                print(f"  {finding.category}: {finding.text}", flush=True)
    rows = [
        {"run": mode, "fault": kind, "faults": count}
        for (mode, kind), count in sorted(faults.items(), key=lambda item: item[0])
    ]
    summary: dict[str, float] = {"num_faults": sum(faults.values()), "num_schedules": number}
    summary |= {KEYS[category]: findings[category] for category in get_args(Category)}
    summary |= {f"num_faults_{mode}": sum(count for (of, _), count in faults.items() if of == mode) for mode in MODES}
    summary |= {f"num_runs_{mode}": schedules[mode] for mode in MODES} | {f"num_starts_{mode}": parts[mode] for mode in MODES}
    summary |= {
        "num_faults_skipped": sum(skipped.values()),
        "minutes": _elapsed_min(started_s),
        "cores_used_by_others": load.cores,
    }
    for why, count in skipped.items():
        print(f"skipped {count}: {why}")
    publish("faults", rows, summary, options)
    if any(findings.values()):
        raise SystemExit(1)


def check_safely(result: Result, reference: Reference) -> list[Finding]:
    """Check a run; one whose files cannot be read has lost them."""
    try:
        return check(result, reference)
    except Exception as error:  # noqa: BLE001, RUF100 - the next schedules still have to run
        return [Finding("unexplained loss", f"the run cannot be checked: {type(error).__name__}: {error}")]


def keep(folder: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("ballast"), ignore_dangling_symlinks=True)


def _elapsed_min(since_s: float) -> float:
    return (time.monotonic() - since_s) / 60


if __name__ == "__main__":
    main()
