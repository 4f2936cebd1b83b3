"""What someone does who has a CSV file and has read nothing: recipe, model, predictions in a DataFrame, report.

`make newcomer` runs it in a fresh environment that has the wheel; a slow test runs it in this one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

NUM_USERS, NUM_ITEMS = 400, 300
HAND_WRITTEN = """
name: hand
data:
  csv: {train: clicks.csv, label: clicked, split: {by: time, column: at}}
features:
  dense:
    - {name: price, log: true, missing: mean, standardise: true}
    - {name: age, missing: mean, standardise: true}
    - {name: member}
  sparse:
    - {name: user, num_rows: 4000}
    - {name: item, num_rows: 3000}
    - {name: city, num_rows: 100}
    - {name: hour, column: at, part: hour, num_rows: 24, hash: none}
model: {width: 16, bottom: [64], top: [64, 32]}
train:
  batch_size: 64
  sparse_optimizer: {kind: rowwise_adagrad, lr: 0.1, eps: 0.01}
  dense_optimizer: {kind: adam, lr: 0.002}
  schedule: {decay: linear}
"""


def clicks(num_rows: int) -> pd.DataFrame:
    """A log as pandas has it: integers with nulls are floats, times are in order."""
    rng = np.random.default_rng(5)
    user, item = rng.integers(0, NUM_USERS, num_rows), rng.zipf(1.4, num_rows) % NUM_ITEMS
    at = pd.Timestamp("2026-10-01") + pd.to_timedelta(np.sort(rng.integers(0, 30 * 86_400, num_rows)), unit="s")
    price, member = np.exp(rng.normal(3, 2, num_rows)), rng.random(num_rows) < 0.4
    logit = rng.normal(0, 1, NUM_USERS)[user] + rng.normal(0, 1, NUM_ITEMS)[item] + 0.5 * member + 0.3 * np.log(price) - 2.2
    clicked = (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(int)
    table = {
        "event_id": np.arange(num_rows) + 10**9,
        "at": at,
        "user": np.where(rng.random(num_rows) < 0.03, np.nan, user),
        "item": item,
        "city": np.where(rng.random(num_rows) < 0.05, None, np.array(["Rome", "Oslo", "Lima"])[rng.integers(0, 3, num_rows)]),
        "price": np.where(rng.random(num_rows) < 0.1, np.nan, price),
        "age": np.where(rng.random(num_rows) < 0.1, np.nan, rng.integers(18, 80, num_rows)),
        "member": member,
        "country": "IT",
        "clicked": clicked,
        "click_time": np.where(clicked == 1, at.astype("datetime64[s]").astype(str), None),
        "dwell": clicked * rng.random(num_rows),
    }
    return pd.DataFrame(table)


COMMANDS = (
    ("init", "clicks.csv", "--label", "clicked"),
    ("train", "recipe.yaml"),
    ("predict", "last", "--out", "predictions.parquet", "--keep", "event_id"),
    ("report", "runs", "--out", "report.html"),
)


def check_results(num_rows: int) -> None:
    """The predictions are those of the log's last rows, and the model is as good as that of a recipe written by hand."""
    import rowstead

    predictions = pd.read_parquet("predictions.parquet")
    log = pd.read_csv("clicks.csv").set_index("event_id")
    assert abs(len(predictions) - num_rows / 10) < num_rows / 200
    assert (log.loc[predictions.event_id, "clicked"].to_numpy() == predictions.label.to_numpy()).all()
    known = log.loc[predictions.event_id[:200]].drop(columns="clicked")
    p = rowstead.load("last").predict(known)  # as pandas reads the file
    assert np.allclose(p, predictions.p[:200], atol=1e-5)
    assert Path("report.html").stat().st_size > 1000
    Path("hand.yaml").write_text(HAND_WRITTEN)
    ours, by_hand = rowstead.evaluate("last").ne, rowstead.train("hand.yaml").quality.ne
    print(f"NE {ours:.4f}; with the recipe written by hand {by_hand:.4f}")
    assert ours < 1.01 * by_hand
    assert ours < 0.95


if __name__ == "__main__":
    clicks(16_000).to_csv("clicks.csv", index=False)
    started = time.monotonic()
    for arguments in COMMANDS:
        subprocess.run([sys.executable, "-m", "rowstead", *arguments], check=True)
    print(f"{time.monotonic() - started:.0f} s")
    check_results(16_000)
