"""While a run trains, its batches are checked by the thread that reads them, once."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rowstead import run
from rowstead.data import batch as batch_module
from rowstead.data.batch import Sparse, check_batch
from rowstead.data.open_log import open_sources
from rowstead.data.source import Batches, Source
from rowstead.kernels.layout import layout_of
from rowstead.spec.errors import DataError
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from tests.small_runs import small_spec


class Spoilt(Source):
    """A Source whose fifth batch names a row that is not there."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.num_samples = source.num_samples
        self.closed = False

    @property
    def num_skipped(self) -> int:
        return 3

    def batches(self, batch_size: int, **options: Any) -> Batches:
        try:
            for number, (batch, cursor) in enumerate(self._source.batches(batch_size, **options)):
                if number == 4:
                    batch.sparse.ids[7] = 50
                yield batch, cursor
        finally:
            self.closed = True


def spoilt_sources(spec: RunSpec, *learned: Any, **options: Any) -> Any:
    sources = open_sources(spec, *learned, **options)
    return dataclasses.replace(sources, train=Spoilt(sources.train))


def test_an_id_that_does_not_fit_ends_a_run_before_the_step_and_keeps_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_sources", spoilt_sources)
    with pytest.raises(DataError, match=r"id 50 of example \d+, feature 0 \(table `sparse_0`\).* after step 4 is saved"):
        run.train(small_spec(), out=tmp_path / "run")
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints", print).step == 4


SEEN = "{name: seen, column: sparse_1, num_rows: 50, pooling: none, max_ids: 4, encoder: {kind: attention}}"
HISTORIES = f"features.sparse=[{{name: item, column: sparse_0, num_rows: 50}}, {SEEN}]"


@pytest.mark.parametrize("changes", [(), (HISTORIES,)], ids=["pooled", "histories"])
def test_batches_are_checked_in_the_readers_thread_and_nowhere_else(
    changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, layouts = [], []
    check = batch_module.check_sparse

    def watched(*args: Any, **kwargs: Any) -> None:
        threads.append(threading.current_thread().name)
        layouts.append(args[0])
        check(*args, **kwargs)

    monkeypatch.setattr(batch_module, "check_sparse", watched)
    run.train(small_spec("train.max_steps=5", *changes), out=tmp_path / "run")
    assert len(threads) >= 5
    assert set(threads) == {"prefetch"}
    assert all(layout is layouts[0] for layout in layouts), "once for the whole batch, not again for its parts"


def test_checks_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr(batch_module, "check_sparse", fail)
    result = run.train(small_spec("train.max_steps=5", "check_ids=false"), out=tmp_path / "run")
    assert result.outcome.position.step == 5


def test_a_checked_source_is_the_source_but_for_the_mark() -> None:
    spec = small_spec()
    layout = layout_of(spec.features, spec.tables)
    plain = open_sources(spec).train
    ours, theirs = (list(source.batches(1000)) for source in (plain.check_ids(layout), plain))
    assert len(ours) == len(theirs)
    for (mine, after), (other, cursor) in zip(ours, theirs, strict=True):
        assert after == cursor
        assert torch.equal(mine.sparse.ids, other.sparse.ids)
        assert mine.sparse.checked_for is layout
        assert other.sparse.checked_for is None
    spoilt = Spoilt(plain)
    source = spoilt.check_ids(layout)
    assert source.num_skipped == 3
    batches = source.batches(64)
    next(batches)
    batches.close()
    assert spoilt.closed


def test_a_batch_with_the_mark_is_still_refused_where_the_rows_are_not() -> None:
    spec = small_spec()
    layout = layout_of(spec.features, spec.tables)
    batch = check_batch(Sparse(ids=torch.tensor([1]), offsets=torch.tensor([0, 1, 1, 1]), num_features=3), layout)
    assert check_batch(batch, layout, torch.device("cpu")) is batch
    with pytest.raises(DataError, match="ids are on cpu, but must be on meta"):
        check_batch(batch, layout, torch.device("meta"))
