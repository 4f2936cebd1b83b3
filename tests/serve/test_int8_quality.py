"""Rows as int8 cost next to nothing on the quickstart."""

from __future__ import annotations

import numpy as np
import pytest

import rowstead
from rowstead.data.synth import SynthLog
from rowstead.training.metrics import Evaluation


@pytest.mark.slow
def test_int8_rows_cost_less_than_a_thousandth_of_ne_on_the_quickstart(tmp_path):
    spec = rowstead.load_recipe("quickstart", ["data.synth.num_train_samples=300_000", "device=cpu"])
    result = rowstead.train(spec, out=tmp_path / "run")
    assert result.quality is not None
    assert result.quality.ne is not None
    rowstead.export(str(result.folder), tmp_path / "int8", int8=True)
    served = rowstead.load_exported(tmp_path / "int8")
    assert spec.data.synth is not None
    log = SynthLog(spec.data.synth)
    rows = log.split("eval")
    evaluation = Evaluation()
    for start in range(rows.start, rows.stop, 8192):
        block = log.rows(start, min(start + 8192, rows.stop))
        p = served.predict_block(block, 0, block.num_rows).astype(np.float64)
        assert block.labels is not None
        evaluation.add(np.log(p) - np.log1p(-p), block.labels)
    ne = evaluation.quality().ne
    assert ne is not None
    assert ne < 1.001 * result.quality.ne
