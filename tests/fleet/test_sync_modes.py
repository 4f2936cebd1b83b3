"""Every sync policy, and stale look-ups, in a whole fleet: each learns as a single process does."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rowstead.fleet.coordinator import train_fleet
from rowstead.run import train
from rowstead.spec.fleet import parse_fleet
from tests.small_runs import small_spec

ROLES = "trainers=2,sparse=2,dense=1,readers=1"
TWO_DENSE = "trainers=2,sparse=1,dense=2,readers=1"
NUM_STEPS = 400
LOG = (f"data.synth.num_train_samples={NUM_STEPS * 64}", "train.sync.period=2")


@cache
def ne_of_one_process() -> float:
    with TemporaryDirectory() as folder:
        quality = train(small_spec(*LOG), out=Path(folder) / "single").quality
    assert quality is not None
    assert quality.ne is not None
    return quality.ne


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "roles"),
    [
        (["mode=allreduce", "hogwild_threads=2"], ROLES),
        (["mode=allreduce", "hogwild_threads=2"], TWO_DENSE),
        (["mode=shadow", "rule=easgd", "staleness=1"], ROLES),
        (["mode=shadow", "rule=easgd"], TWO_DENSE),
        (["mode=shadow", "rule=average"], "trainers=2,sparse=2,dense=1,readers=3"),
        (["mode=shadow", "rule=average"], TWO_DENSE),
        (["mode=shadow", "rule=bmuf", "hogwild_threads=2"], ROLES),
        (["mode=shadow", "rule=bmuf"], TWO_DENSE),
        (["mode=easgd", "staleness=4", "hogwild_threads=2"], ROLES),
        (["mode=easgd", "hogwild_threads=2"], TWO_DENSE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_fleet_learns_with_every_sync_policy_and_with_stale_look_ups(sync: list[str], roles: str, tmp_path: Path) -> None:
    settings = [*LOG, *(f"train.sync.{word}" for word in sync)]
    spec = dataclasses.replace(small_spec(*settings), fleet=parse_fleet(roles))
    record = train_fleet(spec, out=tmp_path / "fleet").record
    assert record is not None
    figures = record.figures
    assert spec.fleet is not None
    num_readers = spec.fleet.num_readers
    num_steps = num_readers * -(-NUM_STEPS // num_readers)  # each reader has a last batch
    assert (figures["num_steps"], figures["num_samples"]) == (num_steps, NUM_STEPS * 64)
    assert (figures["num_restarts"], figures["num_batches_repeated"], figures["num_lost_updates"]) == (0, 0, 0)
    assert figures["trainer_num_exchanges"] > 5  # fewer than its share where a trainer starts late
    assert figures["trainer_num_missed"] == 0
    assert (figures["trainer_num_lookups_early"] > NUM_STEPS / 2) == (spec.train.sync.staleness > 0)
    assert figures["ne"] == pytest.approx(ne_of_one_process(), rel=0.04)
