"""Takes the pictures of README.md, of docs/walkthrough.md, of `rowstead ui` and of docs/paper.html: `make pictures`.

It runs the commands of the walkthrough for real on a small log and photographs what they show, trains the quickstart for the README's
curves, and photographs docs/paper.html as it is.

python -m docs.pictures.walkthrough [FOLDER]      needs Chromium and its driver, as the browser tests do

FOLDER keeps the logs, the runs and what the commands printed; build/walkthrough when left out. What is there is not done again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPE = """name: shop
data:
  parquet:
    train: [log/train-*.parquet]
    eval: [log/eval-*.parquet]
    true_p: true_p
features:
  dense:
    - {name: "dense_{i}", repeat: 4, log: true, standardise: true}
    - {name: "dense_{i}", repeat: 9, start: 4}
  sparse:
    - {name: "sparse_{i}", repeat: 8, num_rows: 5000}
model: {width: 16, bottom: [64], top: [128, 64]}
train:
  batch_size: 512
  sparse_optimizer: {kind: rowwise_adagrad, lr: 0.5, eps: 0.01}
  dense_optimizer: {kind: adam, lr: 0.005}
  schedule: {decay: linear}
  eval_every: 200
threads: 1
"""
COMMANDS = {
    "log": "data synth quickstart --out log --set data.synth.num_train_samples=400_000 --set data.synth.num_eval_samples=40_000",
    "describe": "data describe --recipe shop.yaml --picture log.html",
    "plan": "plan shop.yaml --on laptop,cpu-2s,bigbasin-32,dgx-h100",
    "train": "train shop.yaml",
    "quickstart": "train quickstart --out quickstart",
    "tune": "tune shop.yaml --retune-for train.batch_size=4096 --trials 20 --name retuned --out best.yaml",
    "best": "train best.yaml",
    "report": "report --out report.html --title Shop",
    "export": "export last --to exported",
    "predict": "predict exported --data log/eval-*.parquet --out predictions.parquet",
}


MOVE = """
const [slider, wanted] = [document.getElementById(arguments[0]), arguments[1]];
for (slider.value = 0; ; slider.value = Number(slider.value) + 1) {
  slider.dispatchEvent(new Event('input'));
  if (slider.getAttribute('aria-valuetext') === wanted || slider.value === slider.max) break;
}
"""


def run(folder: Path) -> None:
    """Each command once, with what it printed in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shop.yaml").write_text(RECIPE)
    for name, text in COMMANDS.items():
        out = folder / f"{name}.txt"
        if out.exists():
            continue
        words = [sys.executable, "-m", "rowstead", *text.split()]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"rowstead {text} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        out.write_text(done.stdout)
        print(f"rowstead {text}", flush=True)


def photograph(folder: Path) -> None:
    """The page of the log, the report, both views of `rowstead ui`, and the page of the study."""
    from rowstead.ui.server import Ui
    from tests.ui.browser import chromium, until

    with chromium(1280, 900) as driver:
        driver.get((folder / "log.html").resolve().as_uri())
        until(lambda: driver.execute_script("return document.querySelectorAll('.figure .main-svg').length"))
        shoot(driver, "walkthrough-log.png")
        driver.get((folder / "report.html").resolve().as_uri())
        until(lambda: driver.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))
        for section, name in (("quality", "walkthrough-report.png"), ("search-retuned", "walkthrough-search.png")):
            driver.execute_script("document.getElementById(arguments[0])?.scrollIntoView()", section)
            until(
                lambda section=section: driver.execute_script(
                    "return [...document.querySelectorAll('#' + arguments[0] + ' .figure')].every((one) => one.dataset.drawn)",
                    section,
                )
            )
            shoot(driver, name)
        driver.get((HERE.parent / "paper.html").as_uri())
        until(lambda: driver.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))
        shoot(driver, "paper.png")
        ui = Ui(runs=folder / "runs")
        driver.get(ui.start())
        until(lambda: driver.execute_script("return document.querySelectorAll('#platforms tbody tr').length") > 8)
        driver.find_element("id", "file").send_keys(str((folder / "shop.yaml").resolve()))
        until(lambda: "shop" in driver.execute_script("return document.getElementById('cards').innerText"))
        driver.execute_script("document.getElementById('copy').click()")
        for slider, value in (("slider-num_rows", "60 M"), ("slider-width", "128")):
            driver.execute_script(MOVE, slider, value)
        until(lambda: "…" not in driver.execute_script("return document.getElementById('platforms').innerText"))
        time.sleep(1.0)  # bars move for a moment
        shoot(driver, "walkthrough-what-if.png")
        driver.execute_script("document.getElementById('view-runs').click()")
        until(lambda: driver.execute_script("return document.querySelectorAll('#run-list input').length") > 1)
        driver.execute_script(
            "document.querySelectorAll('#run-list input').forEach((one, index) => { if (index < 2) one.click() })"
        )
        until(lambda: driver.execute_script("return document.querySelectorAll('.run-curve').length") == 2)
        driver.execute_script(
            "const note = document.getElementById('runs-note'); note.textContent = note.textContent.replace(arguments[0], 'runs'); scrollTo(0, 0)",
            str(folder / "runs"),
        )
        shoot(driver, "ui-runs.png")
        ui.close()


def draw_quickstart(folder: Path) -> None:
    """The README's picture, from the quickstart's run; its figures are kept as they are where they were measured from this run."""
    from docs.pictures import make

    measured = folder / "quickstart.json"
    if not measured.exists():
        measured.write_text(json.dumps(make.measure(folder / "quickstart")) + "\n")
    make.FIGURES.write_text(measured.read_text())
    make.PICTURE.write_text(make.draw(json.loads(measured.read_text())))
    print(f"wrote docs/pictures/{make.PICTURE.name}")


def shoot(driver: Any, name: str) -> None:
    """What the window shows now, in few colours: screenshots are kept with the sources."""
    from io import BytesIO

    from PIL import Image

    time.sleep(0.5)
    picture = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(HERE / name, optimize=True)
    print(f"wrote docs/pictures/{name}")


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/walkthrough")
    run(where)
    photograph(where)
    draw_quickstart(where)
