"""Tables go where the recipe or the memory says, train the same there, and take no more than they may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rowstead import evaluate, export, train
from rowstead.records.usage import free_host_bytes
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import to_plain
from rowstead.spec.run import RunSpec
from rowstead.stores.build import measure_memories
from rowstead.stores.cached import CachedStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.mixed import MixedStore
from rowstead.training import checkpoint
from rowstead.training.build import build_model, plan_placement
from rowstead.training.progress import Callback
from tests.small_runs import small_spec

CPU = torch.device("cpu")


class RecordingCallback(Callback):
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    saved = checkpoint.load_latest(folder / "checkpoints", print)
    return {name: saved.tensors[name].clone() for name in saved.tensors}


@pytest.mark.parametrize(
    "placement",
    [
        ["placement.*.where=cached", "placement.*.cache_fraction=0.2"],
        ["placement.*=ssd"],
        ["placement.sparse_0=ssd", "placement.sparse_1=cached", "placement.sparse_2=device"],
        ["memory.host=170KB"],
    ],
)
def test_a_run_ends_at_the_same_weights_wherever_its_tables_are(tmp_path: Path, placement: list[str]) -> None:
    common = [
        "train.max_steps=30",
        "features.sparse.0.num_rows=2000",
        "data.synth.num_ids=5000",
        "data.synth.skew=0.5",
        "device=cpu",
    ]
    plain = train(small_spec(*common), out=tmp_path / "plain")
    (tmp_path / "rows").mkdir()
    folder = f"memory.folder={tmp_path / 'rows'}"
    placed = train(small_spec(*common, folder, *placement), out=tmp_path / "placed")
    expected, found = tensors_of(plain.folder), tensors_of(placed.folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert not list((tmp_path / "rows").iterdir())  # files of rows go when a run is done


def test_a_run_says_where_its_tables_went_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    spec = small_spec("train.max_steps=2", "placement.sparse_1=ssd", f"memory.folder={tmp_path / 'rows'}", "device=cpu")
    heard = RecordingCallback()
    result = train(spec, out=tmp_path / "run", callback=heard)
    table = next(text for text in heard.messages if text.startswith("tables")).splitlines()
    assert table[1].split() == ["sparse_0,", "sparse_2", "device", "3.6", "KB", "all", "fit"]
    assert table[2].split("  ")[-1] == "as the recipe says"
    assert table[3].endswith(f"files in {tmp_path / 'rows'}")
    kept = json.loads((result.folder / "placement.json").read_text())
    assert [one["where"] for one in kept["tables"]] == ["device", "ssd", "device"]


@pytest.mark.parametrize(
    ("assignments", "kind"),
    [
        ([], DeviceStore),
        (["placement.sparse_0=cached"], CachedStore),
        (["placement.sparse_0=ssd"], CachedStore),
        (["placement.sparse_0=ssd", "placement.sparse_1=cached"], MixedStore),
        (["placement.sparse_0=host"], DeviceStore),
    ],
)
def test_as_few_stores_as_possible_hold_the_tables(tmp_path: Path, assignments: list[str], kind: type) -> None:
    model = build_model(small_spec(f"memory.folder={tmp_path}", *assignments), CPU, trains=True)
    assert type(model.store) is kind
    if hasattr(model.store, "close"):
        model.store.close()


def test_a_model_that_only_predicts_is_in_memory_wherever_it_was_trained(tmp_path: Path) -> None:
    spec = small_spec("placement.*=ssd", f"memory.folder={tmp_path / 'gone'}")
    assert type(build_model(spec, CPU, trains=False).store) is DeviceStore


def test_the_memory_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) > 0
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_host_bytes(tmp_path) == 700


def test_limits_of_the_recipe_override_what_is_free() -> None:
    memories = measure_memories(small_spec("memory.host=20MB"), CPU)
    assert memories.free_bytes("device") == 20_000_000
    assert memories.are_limits == {"host"}


@pytest.mark.parametrize(
    ("folder", "problem"), [("missing", "does not exist"), ("locked", "is not writable")], ids=["missing", "locked"]
)
def test_an_unusable_folder_is_refused_before_anything_is_created(tmp_path: Path, folder: str, problem: str) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    if folder == "locked" and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(RowsteadError, match=problem):
        plan_placement(small_spec("placement.*=ssd", f"memory.folder={tmp_path / folder}"), CPU)


def test_tables_beyond_the_limit_are_refused_with_remedies(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match=r"(?s)no placement fits.*memory\.host.*1\. raise memory\.host.*memory\.folder"):
        train(small_spec("memory.host=2KB"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_runs_side_by_side_have_files_of_their_own_and_those_of_killed_ones_are_used_again(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    spec = small_spec("placement.*=ssd", f"memory.folder={tmp_path / 'rows'}", f"name={'n' * 200}", "device=cpu")
    (tmp_path / "rows" / f"{'n' * 100}-0-width-{spec.model.width}.rows").touch()  # a killed run's
    stores = [build_model(spec, CPU, trains=True).store for _ in range(2)]
    names = sorted(path.name for path in (tmp_path / "rows").iterdir())
    assert len(names) == 2
    assert names[0].endswith("-2.rows")
    for store in stores:
        store.close()


LIMITED = """
import sys
from rowstead import train
from rowstead.spec.parse import parse
from rowstead.spec.yaml_text import read_yaml
from pathlib import Path
from rowstead.spec.run import RunSpec
train(parse(RunSpec, read_yaml(Path(sys.argv[1]))), out=sys.argv[2])
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""
OVERHEAD_BYTES = 80_000_000
"""Memory of row files and their cache besides the rows: buffers to read, write and move rows."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_tables_of_twice_the_limit_train_within_it(tmp_path: Path) -> None:
    small, limited = (
        peak_bytes(tmp_path / name, rows, limit) for name, rows, limit in (("a", 100, None), ("b", 31_250, "32MB"))
    )
    assert limited - small <= 32_000_000 + OVERHEAD_BYTES


def peak_bytes(folder: Path, num_rows: int, limit: str | None) -> int:
    """The most memory that a process had which trained 8 tables of so many rows of 256 bytes."""
    (folder / "rows").mkdir(parents=True)
    changes = ["data.synth.num_sparse=8", "data.synth.num_ids=50_000", "data.synth.skew=0.5", "model.width=64", "device=cpu"]
    changes += ["train.max_steps=100", f"features.sparse.0.num_rows={num_rows}", "features.sparse.0.repeat=8"]
    if limit is not None:
        changes += [f"memory.host={limit}", f"memory.folder={folder / 'rows'}"]
    spec: RunSpec = small_spec(*changes)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(to_plain(spec)))
    command = [sys.executable, "-c", LIMITED, str(recipe), str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if limit is not None:
        placed = json.loads((folder / "run" / "placement.json").read_text())["tables"]
        assert {"device", "ssd"} == {table["where"] for table in placed}
    return int(done.stdout.split()[-1]) * 1024


def test_a_run_on_ssd_is_evaluated_there_and_exported_whole(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    spec = small_spec(
        "features.sparse.0.num_rows=2000", "memory.host=170KB", f"memory.folder={tmp_path / 'rows'}", "train.max_steps=3"
    )
    done = train(spec, out=tmp_path / "run")
    assert any(table["where"] == "ssd" for table in json.loads((tmp_path / "run" / "placement.json").read_text())["tables"])
    assert done.quality is not None
    assert evaluate(str(tmp_path / "run")).ne == pytest.approx(done.quality.ne, rel=1e-6)
    export(str(tmp_path / "run"), tmp_path / "exported")
    assert (tmp_path / "exported" / "program.pt2").stat().st_size > 1_000
