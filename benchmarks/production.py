"""The production models of the HPCA 2021 study with equal features, the shapes that our figures have been measured with since the first.

The recipes `m1`, `m2` and `m3` give every feature a hash size and a length of its own, and train as fleets.
"""

from __future__ import annotations

from rowstead.spec.parse import assign, parse
from rowstead.spec.run import RunSpec, load_recipe, read_recipe

MEANS = {"m1": (5_700_000, 28), "m2": (7_300_000, 17), "m3": (3_700_000, 49)}
"""Mean hash size and mean length of the production models, which these benchmarks give to every feature."""


def read_shape(recipe: str) -> RunSpec:
    """A recipe for one process; M1 to M3 with equal features, so that figures stay comparable with earlier ones."""
    if recipe not in MEANS:
        return load_recipe(recipe)
    num_rows, num_ids = MEANS[recipe]
    changes = {
        "data.synth.num_ids": num_rows,
        "data.synth.mean_ids": num_ids,
        "data.synth.length_power": 0.5,
        "data.synth.max_ids": 200,
        "data.synth.num_train_samples": 200_000,
        "data.synth.num_eval_samples": 20_000,
        "features.sparse.0.hash_sizes": [],
        "features.sparse.0.num_rows": num_rows,
        "train.sync": {},
        "fleet": None,
    }
    return parse(RunSpec, assign(read_recipe(recipe), changes))
