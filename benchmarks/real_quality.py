"""How good are the networks on real data, beside FuxiCTR with the same hyper-parameters?

MovieLens-1M (a rating of 4 or more is a click), split by a hash of the row and by time (`benchmarks/movielens_rows.py`). Each network is
trained with the same features, widths, layers, optimizer, learning rate, batch size and dropout as FuxiCTR's, with three seeds; each side selects
the best epoch by the AUC of the validation rows and is measured on the test rows. Besides, the shipped recipe `movielens` is trained as it is.

FuxiCTR is slow, so its results are kept, with their date, in `benchmarks/results/real_quality_fuxictr.json`; `--fuxictr PYTHON` measures those
that are missing, where PYTHON is the interpreter of an environment with `pip install fuxictr==2.3.10 "polars<2"`.

python -m benchmarks.real_quality --quick
python -m benchmarks.real_quality --archive ml-1m.zip --fuxictr /tmp/fuxictr/bin/python --json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rowstead
from benchmarks.harness import RESULTS, arguments, publish
from benchmarks.movielens_rows import ONE_ID, fetch_archive, write_rows
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec, load_recipe

KEPT = RESULTS / "real_quality_fuxictr.json"
SPLITS = ("hash", "time")
SHARED: dict[str, Any] = {
    "width": 16,
    "hidden": [128, 64],
    "dropout": 0.2,
    "l2": 1e-5,
    "lr": 1e-3,
    "batch_size": 4096,
    "epochs": 20,
    "patience": 2,
}
"""Hyper-parameters of both sides; `l2` is of embedding rows."""
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dcnv2": {"cross_layers": 3},
    "deepfm": {},
    "finalmlp": {"heads": 2},
}
"""The networks, and what else they have in common on both sides."""


def own_spec(model: str, folder: Path, split: str, sizes: dict[str, int], *, seed: int, settings: dict[str, Any]) -> RunSpec:
    """The run of one network."""
    num_rows = sum(rowstead_rows(folder / split / "train.parquet"))
    options = {
        "dcnv2": {"structure": "parallel", "cross_layers": MODELS["dcnv2"]["cross_layers"]},
        "finalmlp": {"heads": MODELS["finalmlp"]["heads"], "gate": None},
    }
    each_epoch = -(-num_rows // settings["batch_size"])
    plain: dict[str, Any] = {
        "name": model,
        "data": {"parquet": {part: str(folder / split / f"{part}.parquet") for part in ("train", "eval", "test")}},
        "features": {
            "sparse": [{"name": name, "column": f"c_{name}", "num_rows": sizes[name], "hash": "none"} for name in ONE_ID]
            + [{"name": "genres", "column": "c_genres", "num_rows": sizes["genres"], "hash": "none", "pooling": "mean"}]
        },
        "model": {
            "network": model,
            "width": settings["width"]
            + (model == "deepfm"),  # and a first-order weight, which FuxiCTR has in tables of its own
            "top": settings["hidden"],
            "top_dropout": settings["dropout"],
            "options": options.get(model),
        },
        "train": {
            "batch_size": settings["batch_size"],
            "epochs": settings["epochs"],
            "sparse_optimizer": {"kind": "adam", "lr": settings["lr"], "l2": settings["l2"]},
            "dense_optimizer": {"kind": "adam", "lr": settings["lr"]},
            "schedule": {"decay": "plateau", "factor": 0.1, "patience": 1},
            "eval_every": each_epoch,
            "early_stop": {"monitor": "auc", "patience": settings["patience"]},
        },
        "seed": seed,
        "threads": 1,
    }
    return parse(RunSpec, plain)


def rowstead_rows(file: Path) -> list[int]:
    """Rows of a Parquet file, by row group."""
    import pyarrow.parquet as pq

    metadata = pq.ParquetFile(file).metadata
    return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]


def measured(spec: RunSpec, out: Path) -> dict[str, float]:
    """Train, and measure the best evaluated weights on the test rows."""
    run = rowstead.train(spec, out=out)
    found = rowstead.evaluate(str(run.folder), split="test").figures()
    return {"auc": found["auc"], "log_loss": found["log_loss"], "ne": found["ne"], "num_steps": run.outcome.position.step}


def default_spec(folder: Path, split: str) -> RunSpec:
    """The shipped recipe as it is, on these rows."""
    files = [f"data.parquet.{part}={folder / split / part}.parquet" for part in ("train", "eval", "test")]
    return load_recipe("movielens", files)


def kept_results(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """FuxiCTR's results that are kept for these settings."""
    if not KEPT.is_file():
        return []
    return [row for row in json.loads(KEPT.read_text()) if row["settings"] == settings]


def measure_fuxictr(
    python: str, folder: Path, wanted: Sequence[dict[str, Any]], sizes: dict[str, int], settings: dict[str, Any]
) -> None:
    """Have FuxiCTR train what is missing, one at a time, and keep each result at once."""
    for one in wanted:
        task = {
            **one,
            "folder": str(folder / one["split"]),
            "sizes": sizes,
            "settings": settings,
            "options": MODELS[one["model"]],
        }
        file = Path(__file__).with_name("real_quality_fuxictr.py")
        done = subprocess.run([python, str(file), json.dumps(task)], stdout=subprocess.PIPE, text=True, check=True)
        rows = json.loads(KEPT.read_text()) if KEPT.is_file() else []
        row = {**one, **json.loads(done.stdout.splitlines()[-1]), "settings": settings}
        KEPT.write_text(json.dumps([*rows, row], indent=1) + "\n")
        print(f"FuxiCTR {one}: AUC {row['auc']:.4f}", file=sys.stderr)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The shipped recipe on the hash split, and how far ours are above FuxiCTR's mean, at worst."""
    found = dict[str, float]()
    for key in ("auc", "ne"):
        of_default = [
            row[key] for row in rows if row["by"] == "rowstead" and row["model"] == "movielens" and row["split"] == "hash"
        ]
        if of_default:
            found[f"movielens_default_{key}"] = statistics.fmean(of_default)
    gaps = []
    for model in MODELS:
        for split in SPLITS:
            ours, theirs = (
                [row["auc"] for row in rows if (row["by"], row["model"], row["split"]) == (by, model, split)]
                for by in ("rowstead", "fuxictr")
            )
            if ours and theirs:
                gaps.append(statistics.fmean(ours) - statistics.fmean(theirs))
    return found | ({"vs_fuxictr_auc_min": min(gaps)} if gaps else {})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--archive", type=Path, metavar="FILE", help="ml-1m.zip [default: downloaded with pip]")
    parser.add_argument("--fuxictr", metavar="PYTHON", help="the interpreter of an environment with FuxiCTR, to measure it too")
    parser.add_argument("--models", metavar="NAME,NAME", help=f"only these of {', '.join([*MODELS, 'movielens'])}")
    options = parser.parse_args()
    models = options.models.split(",") if options.models else [*MODELS, "movielens"]
    settings = SHARED | ({"epochs": 1} if options.quick else {})
    splits, seeds = (SPLITS[:1], (1,)) if options.quick else (SPLITS, (1, 2, 3))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = write_rows(options.archive or fetch_archive(folder), folder)
        wanted = [{"model": one, "split": split, "seed": seed} for one in models for split in splits for seed in seeds]
        for number, one in enumerate(wanted):
            if one["model"] == "movielens":
                spec = parse(RunSpec, override(_plain(default_spec(folder, one["split"])), [f"seed={one['seed']}"]))
            else:
                spec = own_spec(**one, folder=folder, sizes=sizes, settings=settings)
            rows.append({**one, "by": "rowstead", **measured(spec, folder / f"run-{number}")})
            print(f"{one}: AUC {rows[-1]['auc']:.4f}", file=sys.stderr)
        of_both = [one for one in wanted if one["model"] in MODELS]
        if options.fuxictr:
            known = [{key: row[key] for key in ("model", "split", "seed")} for row in kept_results(settings)]
            measure_fuxictr(
                os.path.abspath(options.fuxictr), folder, [one for one in of_both if one not in known], sizes, settings
            )
    kept = [{**row, "by": "fuxictr"} for row in kept_results(settings)]
    rows += [{key: value for key, value in row.items() if key != "settings"} for row in kept if row["split"] in splits]
    publish("real_quality", rows, summary_of(rows), options)


def _plain(spec: RunSpec) -> Any:
    from rowstead.spec.parse import to_plain

    return to_plain(spec)


if __name__ == "__main__":
    main()
