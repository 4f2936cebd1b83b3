"""TensorBoard itself reads what our writer wrote."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from rowstead.records.tensorboard import ScalarWriter, masked_crc32c
from rowstead.spec.errors import RowsteadError

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
crc = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_back_every_scalar(tmp_path: Path) -> None:
    with closing(ScalarWriter(tmp_path / "tensorboard")) as writer:
        writer.write(0, {"train/loss": 0.5, "eval/né": 0.25})
        writer.write(300, {"train/loss": 1e-30})
        writer.write(2**40, {"train/loss": 1e300})
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(0, 0.5), (300, pytest.approx(1e-30)), (2**40, math.inf)]
    assert scalars(tmp_path / "tensorboard", "eval/né") == [(0, 0.25)]


def test_wall_times_and_values_that_are_not_numbers_survive(tmp_path: Path) -> None:
    with closing(ScalarWriter(tmp_path)) as writer:
        writer.write(1, {"loss": math.nan})
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Scalars("loss")
    assert math.isnan(event.value)
    assert event.wall_time == pytest.approx(writer.path.stat().st_mtime, abs=60)


def test_scalars_beyond_a_resumed_step_are_superseded(tmp_path: Path) -> None:
    with closing(ScalarWriter(tmp_path)) as writer:
        for step in (10, 20, 30):
            writer.write(step, {"loss": 1.0})
    with closing(ScalarWriter(tmp_path, resumed_step=20)) as writer:
        writer.write(30, {"loss": 2.0})
    assert scalars(tmp_path, "loss") == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_scalar_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    assert scalars(tmp_path, "loss") == [(1, 1.0)]
    writer.close()


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 3])
def test_checksums_are_those_of_tensorboard(data: bytes) -> None:
    assert masked_crc32c(data) == crc.masked_crc32c(data)


def test_a_folder_that_cannot_be_used_is_an_error_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RowsteadError, match="cannot write"):
        ScalarWriter(tmp_path / "file")
