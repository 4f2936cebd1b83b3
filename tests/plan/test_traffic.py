"""How ids fall on rows agrees with what a synthetic log draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.population import Population
from rowstead.plan.traffic import Popularity, distinct_ids, hit_share, mean_ids, popularities, rows_of_ids, truncated_poisson
from rowstead.plan.work import TableWork, step_work
from rowstead.spec.data import SynthSpec
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RECIPES, RunSpec, load_recipe
from rowstead.spec.yaml_text import read_yaml
from rowstead.stores.build import mean_ids_of


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.05, 1.3])
def test_distinct_ids_and_hits_are_those_that_a_log_draws(skew: float) -> None:
    population = Population(SynthSpec(num_sparse=1, num_ids=20_000, mean_ids=10, skew=skew))
    offsets = population.offsets(0, 0, 3_000)
    ranks = population.ranks(0, 0, offsets)
    law = Popularity(20_000, skew)
    assert distinct_ids(law, len(ranks)) == pytest.approx(len(np.unique(ranks)), rel=0.06)
    assert hit_share(law, 500) == pytest.approx((ranks < 500).mean(), abs=0.03)


@given(st.integers(1, 10**8), st.floats(0, 2), st.floats(1, 1e7), st.integers(1, 10**7))
@settings(max_examples=60, deadline=None)
def test_distinct_rows_are_no_more_than_ids_rows_or_draws(num_ids: int, skew: float, draws: float, num_rows: int) -> None:
    found = rows_of_ids(distinct_ids(Popularity(num_ids, skew), draws), num_rows)
    assert 0 < found <= min(num_ids, num_rows, draws) * (1 + 1e-6)


@given(st.integers(1, 10**7), st.floats(0, 2))
@settings(max_examples=40, deadline=None)
def test_a_larger_cache_serves_no_less_and_all_when_it_holds_all(num_ids: int, skew: float) -> None:
    law = Popularity(num_ids, skew)
    shares = [hit_share(law, num_ids * part) for part in (0.0, 0.01, 0.3, 1.0)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(1)


def test_mean_ids_are_those_of_the_log_and_of_truncation() -> None:
    spec = load_recipe("m1")
    assert spec.data.synth is not None
    drawn = Population(spec.data.synth).mean_ids
    assert mean_ids(spec) == pytest.approx(drawn.tolist(), rel=0.01)
    plain = override(read_yaml(RECIPES / "m1.yaml"), ["features.sparse.0.max_ids=5"])
    assert max(mean_ids(parse(RunSpec, plain))) <= 5


@pytest.mark.parametrize(("mean", "cap"), [(3.0, 2), (28.0, 32), (0.5, 10), (49.0, 49)])
def test_truncated_poisson_is_the_mean_of_what_is_kept(mean: float, cap: int) -> None:
    drawn = np.minimum(np.random.default_rng(1).poisson(mean, 200_000), cap).mean()
    assert truncated_poisson(mean, cap) == pytest.approx(drawn, rel=0.01)


def test_a_log_of_files_counts_as_one_id_drawn_evenly() -> None:
    spec = load_recipe("criteo")
    assert set(mean_ids(spec)) == {1.0}
    assert {law.skew for law in popularities(spec)} == {0.0}


@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.floats(1, 60), st.floats(0, 2), st.sampled_from(["fixed", "poisson"]))
@settings(max_examples=40, deadline=None)
def test_every_column_has_the_length_that_the_log_gives_it(
    seed: int, count: int, mean: float, power: float, lengths: str
) -> None:
    plain = {
        "name": "lengths",
        "data": {"synth": {"num_sparse": count, "mean_ids": mean, "length_power": power, "lengths": lengths, "seed": seed}},
        "features": {"sparse": [{"name": "sparse_{i}", "repeat": count, "num_rows": 100}]},
        "model": {"interaction": {"kind": "concat"}},
    }
    spec = parse(RunSpec, plain)
    assert spec.data.synth is not None
    drawn = Population(spec.data.synth).mean_ids
    wanted = [truncated_poisson(one, 200) if lengths == "poisson" else one for one in drawn]
    assert mean_ids(spec) == pytest.approx(wanted, rel=1e-9, abs=0.0 if lengths == "poisson" else 1.0)


def table(*, num_rows: int, num_ids: int, num_features: int = 1, is_hashed: bool = True, skew: float = 1.05) -> TableWork:
    reads = ((10.0, Popularity(num_ids, skew)),) * num_features
    return TableWork(name="rows", num_rows=num_rows, width=16, row_bytes=64, state_bytes=4, reads=reads, is_hashed=is_hashed)


def test_rows_of_a_shared_table_are_those_of_all_its_features() -> None:
    alone, shared = table(num_rows=10**7, num_ids=10**6), table(num_rows=10**7, num_ids=10**6, num_features=3)
    assert shared.ids_per_sample == 30
    assert shared.distinct_rows(1000) == pytest.approx(3 * alone.distinct_rows(1000), rel=0.01)


def test_a_cache_that_holds_all_rows_serves_all_ids_however_many_fall_on_them() -> None:
    many = table(num_rows=1000, num_ids=10**7, skew=0.0)
    assert many.hit_share(1000) == 1
    assert many.hit_share(500) == pytest.approx(0.5, abs=0.01)


def test_ids_that_are_rows_already_do_not_fall_on_one_row() -> None:
    hashed, own = (table(num_rows=1000, num_ids=1000, skew=0.0, is_hashed=is_hashed) for is_hashed in (True, False))
    assert own.distinct_rows(1000) == pytest.approx(1000, abs=1)
    assert hashed.distinct_rows(1000) == pytest.approx(632, abs=2)
    hashes = {name: {one.is_hashed for one in step_work(load_recipe(name)).tables} for name in ("quickstart", "m1", "criteo")}
    assert hashes == {"quickstart": {False}, "m1": {True}, "criteo": {False}}  # of a log in files only rows are known


def test_mean_ids_of_histories_are_those_of_the_log_for_plans_and_placements() -> None:
    spec = load_recipe("din")
    assert spec.data.interests is not None
    length = spec.data.interests.mean_ids("history", 20)
    assert mean_ids(spec) == (1.0, length)
    assert mean_ids_of(spec) == [1.0, length]
