"""Specs, planner, kernels and stores agree with the registry about every row optimizer, and only the rules name one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from rowstead.kernels.layout import layout_of
from rowstead.kernels.row_state import NUM_SCALARS, new_row_state, step_scalars
from rowstead.plan.work import record_bytes, step_work
from rowstead.spec.errors import SpecError
from rowstead.spec.features import tables_of
from rowstead.spec.parse import override, parse
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import RECIPES, RunSpec
from rowstead.spec.train import DENSE_STATE
from rowstead.spec.yaml_text import read_yaml
from rowstead.stores.device import DeviceStore

SOURCES = Path(__file__).parents[2] / "src" / "rowstead"
RULES = {"spec/row_optimizers.py", "kernels/reference.py", "kernels/cpu/row_optimizers.py", "kernels/gpu/row_optimizers.py"}
COUPLED_RULES = RULES | {"distributed/sharded_sums.py"}
"""Of optimizers that divide a row by the squares of all its columns: shards by columns need a rule of their own."""

every_optimizer = pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))


def run_with(kind: RowOptimizerName) -> RunSpec:
    return parse(RunSpec, override(read_yaml(RECIPES / "quickstart.yaml"), [f"train.sparse_optimizer.kind={kind}"]))


@every_optimizer
def test_its_hyper_parameters_are_checked_fields_of_the_spec(kind: RowOptimizerName) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(SparseOptimizerSpec)}
    for name in ROW_OPTIMIZERS[kind].hyper_parameters:
        assert isinstance(defaults[name], float)
        with pytest.raises(SpecError, match=name):
            SparseOptimizerSpec(**{name: -1.0})
    assert run_with(kind).train.sparse_optimizer.kind == kind


@every_optimizer
def test_kernels_have_room_for_its_state_and_its_scalars(kind: RowOptimizerName) -> None:
    entry = ROW_OPTIMIZERS[kind]
    assert len(entry.state) <= 2
    scalars = step_scalars(SparseOptimizerSpec(kind=kind), lr=0.25, step=3)
    assert len(scalars) == NUM_SCALARS
    assert scalars[0] == 0.25


def test_codes_are_distinct() -> None:
    assert sorted(entry.code for entry in ROW_OPTIMIZERS.values()) == list(range(len(ROW_OPTIMIZERS)))


@every_optimizer
@pytest.mark.parametrize("width", [1, 24])
def test_state_has_the_names_shapes_and_bytes_that_the_registry_says(kind: RowOptimizerName, width: int) -> None:
    state = new_row_state(kind, torch.zeros(7, width, dtype=torch.bfloat16))
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: (7, columns) for name, columns in ROW_OPTIMIZERS[kind].state_columns(width).items()
    }
    assert sum(tensor.nbytes for tensor in state.values()) == 7 * ROW_OPTIMIZERS[kind].state_bytes(width)


@every_optimizer
def test_the_planner_counts_what_a_store_holds(kind: RowOptimizerName) -> None:
    spec = run_with(kind)
    tables = tables_of(spec.features, width=spec.model.width)
    store = DeviceStore(layout_of(spec.features, tables), spec.train.sparse_optimizer)
    held = sum(tensor.nbytes for tensor in store.state().values())
    assert held == sum(table.num_rows * record_bytes(spec, table.width) for table in tables)
    assert held == sum(table.num_rows * (table.row_bytes + table.state_bytes) for table in step_work(spec).tables)


def test_only_the_registry_and_the_rules_name_a_row_optimizer() -> None:
    """Names of dense optimizers cannot be told apart and are left out; one that is also a setting counts where it is a `kind`."""
    files = [path for path in SOURCES.rglob("*.*") if path.suffix in (".py", ".js")]
    for name in ROW_OPTIMIZERS.keys() - DENSE_STATE.keys():
        before = r"kind\b[^\n]{0,20}" if name in {field.name for field in dataclasses.fields(SparseOptimizerSpec)} else ""
        named = re.compile(rf"""{before}["'=]{name}["']""")
        found = {str(path.relative_to(SOURCES)) for path in files if named.search(path.read_text(encoding="utf-8"))}
        assert found <= (COUPLED_RULES if ROW_OPTIMIZERS[name].couples_columns else RULES)
