"""A run that was really trained has all its figures: steps, time, quality, calibration and tables."""

from __future__ import annotations

from pathlib import Path

from rowstead import run
from rowstead.report.inputs import gather
from rowstead.report.page import page_from, sections_of
from rowstead.spec.run import load_recipe


def test_a_trained_run_has_every_figure(tmp_path: Path) -> None:
    changes = [
        "data.synth.num_train_samples=6_000",
        "data.synth.num_eval_samples=2_000",
        "train.batch_size=256",
        "train.eval_every=10",
        "train.log_every=5",
        "train.checkpoint_every=null",
        "threads=1",
    ]
    result = run.train(load_recipe("quickstart", changes), root=tmp_path)
    material = gather([tmp_path])
    keys = {figure.key: figure for section in sections_of(material) for figure in section.figures}
    assert {"mean-step", "time-by-phase", "speed", "ne", "calibration", "feature-sizes", "placement-by-memory"} <= keys.keys()
    assert result.quality is not None
    assert keys["ne"].traces[1]["y"][-1] == result.quality.ne
    assert result.quality.reliability is not None
    assert tuple(keys["calibration"].traces[1]["x"]) == result.quality.reliability.predicted
    assert sum(keys["calibration"].traces[1]["customdata"]) == 2_000
    assert result.folder.name in page_from(material)
