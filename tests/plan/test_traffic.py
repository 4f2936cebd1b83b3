"""How ids fall on rows agrees with what a synthetic log draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.population import Population
from rowstead.plan.traffic import Popularity, distinct_ids, distinct_rows, hit_share, mean_ids, popularities, truncated_poisson
from rowstead.spec.data import SynthSpec
from rowstead.spec.parse import override, parse, read_yaml
from rowstead.spec.run import RECIPES, RunSpec, load_recipe


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
    found = distinct_rows(Popularity(num_ids, skew), num_rows, draws)
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
    assert sorted(mean_ids(spec)) == pytest.approx(sorted(drawn.tolist()), rel=0.01)
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
