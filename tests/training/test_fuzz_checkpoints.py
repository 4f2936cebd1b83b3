"""Whatever is in a manifest or in the header of a shard, loading ends with the tensors or with a CheckpointError.

The suite tries a hundred cases with each test. To try 100,000 in all, some minutes on two cores:

    ROWSTEAD_FUZZ_CASES=100000 python -m pytest -n 2 tests/training/test_fuzz_checkpoints.py --timeout=3600
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rowstead.spec.errors import CheckpointError
from rowstead.stores.state import part_of
from rowstead.training.checkpoint import Checkpoint, load, save
from rowstead.training.checkpoint_increment import Increment
from rowstead.training.checkpoint_manifest import MANIFEST
from rowstead.training.touched import RowBitmap
from tests.training.crafted import Plain, join_shard, replace_shard, seal, split_shard

NUM_CASES = int(os.environ.get("ROWSTEAD_FUZZ_CASES", "500"))
"""Over the five tests."""
fuzz = settings(max_examples=NUM_CASES // 5, deadline=None, suppress_health_check=list(HealthCheck))
SHARD = "shard-00000.safetensors"

numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(),
    st.booleans(),
)
KINDS = ("F32", "F64", "I64", "U8", "BOOL", "F16", "exact", "int8", "fp16")
NAMES = (
    "store.t.rows",
    "net.b",
    "touched.t",
    "step-000000001",
    "step-000000002",
    "",
    "..",
    "/etc/passwd",
    "/dev/zero",
    "\x1b[2J",
)
FILES = (SHARD, MANIFEST, "shard-00001.safetensors", "shard-00002.safetensors")
words = st.sampled_from((*KINDS, *NAMES, *FILES))
scalars = st.one_of(st.none(), numbers, words, st.text(max_size=4))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint of step 1 and an incremental one of step 2, each in several shards."""
    folder = tmp_path_factory.mktemp("fuzz")
    rows = torch.arange(40.0).reshape(10, 4)
    dense = {"net.b": torch.arange(3.0), "net.s": torch.tensor(5)}
    parts = [part_of("t.rows", rows)]
    full = save(folder, 1, dense, {"a": [1, {"b": 2.5}]}, keep=9, shard_bytes=64, parts=parts)
    bits = RowBitmap(10, torch.tensor([0b1010_0000, 0b10], dtype=torch.uint8).numpy())
    save(
        folder,
        2,
        dense,
        {},
        keep=9,
        shard_bytes=64,
        parts=parts,
        increment=Increment(base=full.name, number=1, touched={"t": bits}),
    )
    return folder


@pytest.fixture(scope="module")
def crafted(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that every case changes and puts right again."""
    return Path(shutil.copytree(good, tmp_path_factory.mktemp("crafted") / "checkpoints"))


def places_in(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in JSON content, with each of its keys or indices."""
    for key, value in list(plain.items()) if isinstance(plain, dict) else list(enumerate(plain)):
        yield plain, key
        if isinstance(value, (dict, list)):
            yield from places_in(value)


def mutate(data: st.DataObject, plain: Any) -> None:
    """Change, remove, copy or add a few things anywhere in JSON content."""
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(places_in(plain))
        if not places:
            return
        container, key = (
            data.draw(st.sampled_from(places)) if len(places) < 2 else places[data.draw(st.integers(0, len(places) - 1))]
        )
        how = data.draw(st.sampled_from(["replace", "number", "remove", "copy", "rename"]))
        if how == "replace":
            container[key] = data.draw(values)
        elif how == "number":
            container[key] = data.draw(numbers)
        elif how == "remove":
            del container[key]
        elif how == "copy":
            other, there = places[data.draw(st.integers(0, len(places) - 1))]
            container[key] = json.loads(json.dumps(other[there] if not isinstance(other, list) or there < len(other) else None))
        elif isinstance(container, dict):
            container[data.draw(words)] = container.pop(key)


def assert_loads_or_refuses(path: Path) -> None:
    """Loading raises nothing but a CheckpointError in one printable line; what it accepts can be read to the last element."""
    saved, refusal = None, f"{path.name} is loaded"
    try:
        saved = load(path)
    except CheckpointError as error:
        refusal = str(error)
    assert refusal.isprintable(), refusal
    assert path.name in refusal
    if saved is not None:
        read_all(saved)


def read_all(saved: Checkpoint) -> None:
    for name in saved.tensors:
        tensor = saved.tensors[name]
        assert tuple(tensor.shape) == saved.tensors.shape(name)
        assert tensor.dtype == saved.tensors.dtype(name)


@fuzz
@given(data=st.data(), name=st.sampled_from(["step-000000001", "step-000000002"]))
def test_any_manifest_loads_or_is_refused(good: Path, crafted: Path, data: st.DataObject, name: str) -> None:
    path = crafted / name
    manifest = json.loads((good / name / MANIFEST).read_bytes())
    mutate(data, manifest)
    seal(path, json.dumps(manifest).encode())
    assert_loads_or_refuses(path)
    for file in (MANIFEST, "manifest.sha256"):
        shutil.copy(good / name / file, path / file)


@fuzz
@given(data=st.data(), name=st.sampled_from(["step-000000001", "step-000000002"]))
def test_any_header_of_a_shard_loads_or_is_refused(good: Path, crafted: Path, data: st.DataObject, name: str) -> None:
    path = crafted / name
    file = data.draw(st.sampled_from(sorted(shard.name for shard in path.glob("*.safetensors"))))
    header, content = split_shard((good / name / file).read_bytes())
    mutate(data, header)
    shard = join_shard(json.dumps(header).encode(), content)
    replace_shard(path, file, shard)
    assert_loads_or_refuses(path)
    for changed in (file, MANIFEST, "manifest.sha256"):
        shutil.copy(good / name / changed, path / changed)


@fuzz
@example(content=b"")
@example(content=b"\xff" * 8)
@given(content=st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: len(tail).to_bytes(8, "little") + tail))
def test_any_bytes_as_a_shard_are_refused(good: Path, crafted: Path, content: bytes) -> None:
    path = crafted / "step-000000001"
    replace_shard(path, SHARD, content)
    with pytest.raises(CheckpointError, match=SHARD):
        load(path)
    for changed in (SHARD, MANIFEST, "manifest.sha256"):
        shutil.copy(good / path.name / changed, path / changed)


@fuzz
@given(content=st.binary(max_size=60) | values.map(lambda plain: json.dumps(plain).encode()))
def test_any_bytes_as_a_manifest_are_refused(good: Path, crafted: Path, content: bytes) -> None:
    path = crafted / "step-000000001"
    seal(path, content)
    with pytest.raises(CheckpointError, match=path.name):
        load(path)
    for changed in (MANIFEST, "manifest.sha256"):
        shutil.copy(good / path.name / changed, path / changed)


@fuzz
@given(data=st.data())
def test_what_is_accepted_is_what_safetensors_itself_reads(good: Path, crafted: Path, data: st.DataObject) -> None:
    """One tensor in one shard, of any header: safetensors' own loader accepts every shard that we do, and reads the same."""
    path = crafted / "step-000000001"
    entry: Plain = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header: Plain = {"x": entry}
    mutate(data, header)
    shape = entry.get("shape")
    shard = join_shard(json.dumps(header).encode(), bytes(range(24)))
    tensor = {
        "dtype": entry.get("dtype"),
        "shape": shape,
        "pieces": [[SHARD, 0, shape[0] if isinstance(shape, list) and shape else 1]],
    }
    seal(path, json.dumps({"format": 2, "step": 1, "facts": {}, "files": {}, "tensors": {"x": tensor}}).encode())
    replace_shard(path, SHARD, shard)
    try:
        ours = load(path).tensors["x"]
    except CheckpointError:
        pass
    else:
        theirs = safetensors.torch.load(shard)["x"]
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    for changed in (SHARD, MANIFEST, "manifest.sha256"):
        shutil.copy(good / path.name / changed, path / changed)
