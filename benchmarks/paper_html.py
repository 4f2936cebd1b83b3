"""Builds docs/paper.html: each figure and table of the HPCA 2021 study, beside it what this machine measured and what we predict.

python -m benchmarks.paper_html                   everything: quick sweeps, the quality study, then the page
python -m benchmarks.paper_html sweeps fig10      some sweeps alone; those that are done already are passed over
python -m benchmarks.paper_html quality           the quality study alone
python -m benchmarks.paper_html page              the page from what has been measured so far

Measurements are kept under build/paper, so that what was interrupted goes on where it was. Sentences on the page are made from the
figures: they say that something agrees only where it does.
"""

from __future__ import annotations

import argparse
import html
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper import error
from benchmarks.paper_item import Item
from benchmarks.paper_items import items
from rowstead.records.store import Contents, RunStore
from rowstead.report.html import Section, Verdict, page_of
from rowstead.report.theme import Chart, TextTable, diagonal, layout, log_axis, points
from rowstead.spec.catalogue import MACHINE_VARIABLE, load_software

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "build" / "paper"
PAGE = ROOT / "docs" / "paper.html"
SWEEPS = ("fig5", "fig9", "fig10", "fig11", "fig12", "fig13", "fig14", "fig15")
HERE_FILE = "here.yaml"
"""This machine as it was measured, by which it is predicted."""
NEAR = 0.25
"""A prediction this far off counts as near."""
QUALITY = "paper-quality"
"""The shipped quality study."""


@dataclass(frozen=True)
class Command:
    """One piece of the work."""

    name: str
    words: tuple[str, ...]


def commands(chosen: Sequence[str], runs: Path = RUNS) -> list[Command]:
    """The commands that measure: this machine, quick sweeps, the whole population of Fig. 9 by prediction, and the quality study."""
    made = [] if (runs / HERE_FILE).is_file() else [Command("machine", ("calibrate", "--out", str(runs / HERE_FILE)))]
    made += [Command(name, ("sweep", name, "--quick", "--runs", str(runs))) for name in SWEEPS]
    made.append(Command("fig9", ("sweep", "fig9", "--predict-only", "--runs", str(runs))))
    made.append(Command("quality", ("quality", QUALITY, "--quick", "--runs", str(runs))))
    return [one for one in made if one.name in chosen or (one.name == "machine" and set(chosen) & set(SWEEPS))]


def measure(chosen: Sequence[str], runs: Path) -> int:
    """Run what was chosen, one after the other; what fails is said, and the others go on."""
    failed, machine = 0, runs / HERE_FILE
    runs.mkdir(parents=True, exist_ok=True)
    for one in commands(chosen, runs):
        start_s = time.monotonic()
        print(f"rowstead {' '.join(one.words)}", flush=True)
        status = subprocess.run(
            [sys.executable, "-m", "rowstead", *one.words],
            cwd=ROOT,
            env={**os.environ, **({MACHINE_VARIABLE: str(machine)} if machine.is_file() else {})},
            check=False,
        ).returncode
        failed += status != 0
        print(
            f"  {one.name}: {time.monotonic() - start_s:.0f} s{'' if status == 0 else f', ended with status {status}'}",
            flush=True,
        )
    return failed


def page(contents: Contents) -> str:
    """The whole page."""
    software = load_software("operators-2020")
    found = items(contents, software)
    sections = [
        Section(
            key="about",
            title="Does it agree?",
            short="Verdict",
            blocks=[_count(found), _verdicts(found), f"<p>{html.escape(ABOUT)}</p>"],
            charts=[study_against_prediction(found)],
            tables=[_misses(found), _summary(found)],
        )
    ]
    sections += [_section(item) for item in found]
    bad = f" {contents.num_bad_lines:,} lines of the store could not be read." if contents.num_bad_lines else ""
    return page_of(
        "Training efficiency: the 2021 study and ours",
        "Acun et al., Understanding Training Efficiency of Deep Learning Recommendation Models at Scale, HPCA 2021"
        + _where(contents),
        sections,
        foot="Written by python -m benchmarks.paper_html (make paper). Facts and figures of the study in our own words." + bad,
    )


ABOUT = (
    "The study measured production fleets, Big Basin and a Zion prototype. We have none of them. For each of its figures and tables that has "
    "numbers, this page shows what the study found, what this machine measured in a sweep that is small enough for it, what the equations of "
    "rowstead plan predict for the study's own machines and sizes, and where these differ. Absolute speeds of this machine mean nothing for "
    "a fleet: look at the shapes."
)


def _where(contents: Contents) -> str:
    for entry in contents.entries:
        if entry.is_measured and "cpu" in entry.record.machine:
            cores = entry.record.machine.get("num_usable_cores", entry.record.machine.get("num_cores", "?"))
            return f" · measured on {cores} cores of {entry.record.machine['cpu']}, {entry.record.date[:10]}"
    return " · nothing was measured yet"


def _verdict(item: Item) -> Verdict:
    """Whether ours agree with the study, in a word or two."""
    if item.verdict == "yes":
        return Verdict("agrees", "good")
    if item.verdict == "no":
        return Verdict("differs", "bad")
    if item.verdict.startswith("partly: "):
        return Verdict(item.verdict.removeprefix("partly: ") + " agree", "mixed")
    return Verdict(item.verdict)


def _verdicts(found: Sequence[Item]) -> str:
    """A badge for each figure and table of the study, with a link to it."""
    made = ""
    for item in found:
        number, _, what = item.title.partition(": ")
        made += (
            f'<a class="card" href="#{item.key}"><span class="name">{html.escape(number)}</span>'
            f'<span class="what">{html.escape(what)}</span>{_verdict(item).html()}</a>'
        )
    return f'<div class="cards verdicts">{made}</div>'


def study_against_prediction(found: Sequence[Item]) -> Chart:
    """Every figure that the study prints against our prediction of it."""
    compared = [one for item in found for one in item.compared]
    values = [value for one in compared for value in (one.study, one.ours)]
    traces = [diagonal("equal", min(values) / 1.1, max(values) * 1.1)]
    for index, kind in enumerate(dict.fromkeys(one.kind for one in compared)):
        mine = [one for one in compared if one.kind == kind]
        hover = "%{text}<br>the study %{x:.2f}<br>predicted %{y:.2f}<extra>" + kind + "</extra>"
        text = [one.what for one in mine]
        traces.append(
            points(kind, [one.study for one in mine], [one.ours for one in mine], index, text=text, hovertemplate=hover)
        )
    near = sum(abs(one.ours / one.study - 1) <= NEAR for one in compared)
    rows = tuple(
        (f"{one.kind}, {one.what}", f"{one.study:.2f}", f"{one.ours:.2f}", f"{one.ours / one.study - 1:+.0%}")
        for one in compared
    )
    return Chart(
        key="study-against-prediction",
        title="The study against our prediction",
        words=f"Each point is a ratio that the study prints; on the dotted line ours is equal. {near} of {len(compared)} are within "
        f"{NEAR:.0%}, and the mean error is {error(one.ours / one.study for one in compared):.0%}. The software's constants were fitted to Fig. 10 and chosen with the others in view, so this is a calibrated model.",
        traces=traces,
        layout=layout(log_axis("the study", values), log_axis("predicted", values)),
        table=TextTable("Ratios", ("of the study", "the study", "predicted", "off by"), rows),
        height_rem=26,
    )


def _summary(found: Sequence[Item]) -> TextTable:
    rows = tuple((item.title, item.verdict, item.measured_words, item.predicted_words) for item in found)
    return TextTable("The study's figures", ("of the study", "agrees", "measured here", "predicted"), rows)


def _count(found: Sequence[Item]) -> str:
    said = [holds for item in found for _, holds in item.said]
    verdict = Verdict(f"{sum(said)} of {len(said)} hold", "good" if all(said) else "mixed" if any(said) else "bad")
    return (
        f'<p class="headline">{verdict.html()} Of {len(said)} statements of the study that can be checked, {sum(said)} hold of our figures and '
        f"{len(said) - sum(said)} do not.</p>"
    )


def _misses(found: Sequence[Item]) -> TextTable:
    rows = tuple((item.title.partition(":")[0], text) for item in found for text, holds in item.said if not holds)
    return TextTable("What does not hold, with its size", ("of the study", "ours"), rows)


def _section(item: Item) -> Section:
    blocks = [
        f"<p><strong>The study:</strong> {html.escape(item.paper)}</p>",
        f"<p><strong>Ours:</strong> {html.escape(item.differs)}</p>",
    ]
    short = item.title.partition(":")[0] + (" (power)" if item.key == "fig10-power" else "")
    return Section(
        key=item.key,
        title=item.title,
        short=short,
        verdict=_verdict(item),
        blocks=blocks,
        charts=item.figures,
        tables=item.tables,
    )


def main() -> int:
    """Measure what was asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "sweeps", "quality", "page"), default="all")
    parser.add_argument("names", nargs="*", metavar="SWEEP", help="with `sweeps`: only these")
    parser.add_argument("--out", type=Path, default=PAGE, help="where the page goes [docs/paper.html]")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where measurements are kept [build/paper]")
    options = parser.parse_args()
    for name in options.names:
        if name not in SWEEPS:
            parser.error(f"no sweep `{name}`: there are {', '.join(SWEEPS)}")
    failed = 0
    if options.what in ("all", "sweeps"):
        failed += measure(options.names or SWEEPS, options.runs)
    if options.what in ("all", "quality"):
        failed += measure(["quality"], options.runs)
    if options.what in ("all", "page"):
        options.out.write_text(page(RunStore(options.runs).read()), encoding="utf-8")
        print(f"wrote {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
