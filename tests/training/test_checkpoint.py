"""Checkpoints come back as they were saved, or are refused with the damaged file named."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rowstead.spec.errors import CheckpointError
from rowstead.training import checkpoint_files, checkpoint_manifest
from rowstead.training.checkpoint import checkpoints_in, load, load_latest, save

dtypes = st.sampled_from(list(checkpoint_files.DTYPES.values()))
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def tensor_of(draw: st.DrawFn) -> Tensor:
    """A tensor of any type and shape, also one that is not contiguous, of random bits."""
    dtype, shape = draw(dtypes), draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_bytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    tensor = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    return tensor.mT if tensor.dim() >= 2 and draw(st.booleans()) else tensor


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
tensor_dicts = st.dictionaries(names, tensor_of(), max_size=6)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal type, shape and bits, so that NaN equals itself."""
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def small(step: int) -> dict[str, Tensor]:
    """Tensors that all say which step they are of."""
    return {
        "user.rows": torch.full((64, 4), float(step)),
        "user.moment": torch.full((64,), float(step), dtype=torch.bfloat16),
        "top.0.bias": torch.full((), step),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def folder_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=40, deadline=None)
@given(tensors=tensor_dicts, shard_bytes=st.sampled_from([1, 7, 64, 500, 1 << 30]), step=st.integers(0, 2**40))
def test_any_tensors_come_back_bit_for_bit(tensors: dict[str, Tensor], shard_bytes: int, step: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = save(Path(temporary), step, tensors, {"cursor": {"row": step}}, keep=1, shard_bytes=shard_bytes)
        loaded = load(path)
        assert loaded.step == step
        assert loaded.facts == {"cursor": {"row": step}}
        assert list(loaded.tensors) == list(tensors)
        for name, tensor in tensors.items():
            assert same_bits(loaded.tensors[name], tensor)
            assert loaded.tensors.shape(name) == tuple(tensor.shape)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_rows=st.integers(0, 40), shard_bytes=st.integers(1, 400))
def test_any_range_of_rows_is_read_across_shards(data: st.DataObject, num_rows: int, shard_bytes: int) -> None:
    table = torch.arange(num_rows * 3).reshape(num_rows, 3)
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    with tempfile.TemporaryDirectory() as temporary:
        saved = load(save(Path(temporary), 1, {"t": table}, {}, keep=1, shard_bytes=shard_bytes)).tensors
        assert torch.equal(saved.rows("t", start, stop), table[start:stop])
        with pytest.raises(IndexError, match="has shape"):
            saved.rows("t", start, num_rows + 1)


def test_shards_are_safetensors_files_within_the_size_asked_for(folder: Path) -> None:
    tensors = {
        "large": torch.randn(1000, 16),
        "odd": torch.ones(3, dtype=torch.bool),
        "wide": torch.randn(2, 8, dtype=torch.float64),
    }
    path = save(folder, 5, tensors, {}, keep=1, shard_bytes=10_000)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 7
    parts = [load_file(shard) for shard in shards]
    assert all(sum(t.numel() * t.element_size() for t in part.values()) <= 10_000 for part in parts)
    assert torch.equal(torch.cat([part["large"] for part in parts if "large" in part]), tensors["large"])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["tensors"]["large"]["pieces"][:2] == [[shards[0].name, 0, 156], [shards[1].name, 156, 312]]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_the_manifest_digest_is_one_that_sha256sum_checks(folder: Path) -> None:
    path = save(folder, 5, small(5), {}, keep=1)
    assert subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=path, capture_output=True).returncode == 0


def test_tensors_that_share_memory_and_parameters_are_saved(folder: Path) -> None:
    table = torch.randn(10, 4)
    tensors = {"a": table, "b": table, "half": table[5:], "p": torch.nn.Parameter(torch.randn(3))}
    saved = load(save(folder, 1, tensors, {}, keep=1)).tensors
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())


def test_what_is_loaded_can_be_changed_without_changing_the_checkpoint(folder: Path) -> None:
    path = save(folder, 1, small(1), {}, keep=1)
    load(path).tensors["user.rows"].zero_()
    assert load(path).tensors["user.rows"].eq(1).all()


def test_facts_keep_every_bit_of_a_number(folder: Path) -> None:
    facts = {"lr": 0.1 + 0.2, "best": math.inf, "steps": 2**60, "words": ["é", None, True]}
    assert load(save(folder, 1, {}, facts, keep=1)).facts == facts


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_in_any_file_is_detected_and_the_file_named(good: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(good.iterdir())))
    content = bytearray(file.read_bytes())
    index, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    content[index] ^= 1 << bit
    with damaged(file, bytes(content)), pytest.raises(CheckpointError, match=file.name) as caught:
        load(good)
    assert "digest" in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_truncated_or_lengthened_file_is_detected_and_named(good: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(good.iterdir())))
    content = file.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    with damaged(file, content[:length]), pytest.raises(CheckpointError, match=file.name) as caught:
        load(good)
    if file.suffix == ".safetensors":
        assert f"truncated: expected {len(content)} bytes, got {length}" in str(caught.value)
    with damaged(file, content + b" "), pytest.raises(CheckpointError, match=file.name):
        load(good)


def test_a_missing_file_is_named(good: Path) -> None:
    for file in sorted(good.iterdir()):
        with damaged(file, None), pytest.raises(CheckpointError, match=f"{file.name} is missing"):
            load(good)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load(good.parent / "step-000000999")


def test_an_unknown_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folder, 1, small(1), {}, keep=1)
    monkeypatch.setattr(checkpoint_manifest, "READABLE", (98, 99))
    with pytest.raises(CheckpointError, match=r"has format 2, .* reads formats 98, 99"):
        load(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with several shards, which every test leaves as it was."""
    folder = tmp_path_factory.mktemp("good")
    return save(folder, 7, small(7), {"lr": 1e-05, "text": "é"}, keep=1, shard_bytes=400)


@contextlib.contextmanager
def damaged(file: Path, content: bytes | None) -> Iterator[None]:
    """Inside it a file has other content, or none; afterwards its own."""
    before = file.read_bytes()
    file.unlink() if content is None else file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def test_the_newest_valid_checkpoint_is_loaded_and_damaged_ones_are_reported(folder: Path) -> None:
    for step in (100, 200, 300):
        save(folder, step, small(step), {"step": step}, keep=3)
    shard = folder / "step-000000300" / "shard-00000.safetensors"
    os.truncate(shard, 10)
    reported: list[str] = []
    latest = load_latest(folder, reported.append)
    assert latest.step == latest.facts["step"] == 200
    assert [(shard.parent.name in text, shard.name in text) for text in reported] == [(True, True)]


def test_when_no_checkpoint_is_valid_each_is_listed_with_its_reason(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_latest(folder, print)
    for step in (1, 2):
        save(folder, step, small(step), {}, keep=2)
    (folder / "step-000000001" / "manifest.json").unlink()
    os.truncate(folder / "step-000000002" / "shard-00000.safetensors", 3)
    with pytest.raises(CheckpointError, match=r"(?s)000000002.*got 3.*000000001.*manifest.json is missing"):
        load_latest(folder, lambda _: None)


def test_the_last_k_are_kept(folder: Path) -> None:
    for step in range(0, 50, 10):
        save(folder, step, small(step), {}, keep=2)
    assert folder_names(folder) == ["step-000000030", "step-000000040"]
    save(folder, 50, small(50), {}, keep=1)
    assert folder_names(folder) == ["step-000000050"]
    for step in (999_999_999, 1_000_000_000):  # more digits than the names have
        save(folder, step, {}, {}, keep=2)
    assert [load(path).step for path in checkpoints_in(folder)] == [999_999_999, 1_000_000_000]
    with pytest.raises(ValueError, match="keep"):
        save(folder, 60, small(60), {}, keep=0)


def test_a_step_saved_again_supersedes_the_old_one_and_the_future_it_left(folder: Path) -> None:
    for step in (100, 200, 300):
        save(folder, step, small(step), {"try": 1}, keep=3)
    os.truncate(folder / "step-000000300" / "shard-00000.safetensors", 10)
    os.truncate(folder / "step-000000200" / "shard-00000.safetensors", 10)
    path = save(folder, 200, small(200), {"try": 2}, keep=3)
    latest = load_latest(folder, pytest.fail)
    assert latest.path == path
    assert latest.facts == {"try": 2}
    assert [load(path).step for path in checkpoints_in(folder)] == [100, 200]


def test_reading_still_works_after_the_checkpoint_was_deleted(folder: Path) -> None:
    opened = load(save(folder, 1, small(1), {}, keep=1))
    save(folder, 2, small(2), {}, keep=1)
    assert folder_names(folder) == ["step-000000002"]
    assert opened.tensors["user.rows"].eq(1).all()


def test_leftovers_of_a_killed_save_are_ignored_and_then_removed(folder: Path) -> None:
    save(folder, 1, small(1), {}, keep=1)
    shutil.copytree(folder / "step-000000001", folder / ".tmp-save-000000002-123")
    assert load_latest(folder, pytest.fail).step == 1
    save(folder, 3, small(3), {}, keep=2)
    assert folder_names(folder) == ["step-000000001", "step-000000003"]


def test_an_interrupted_save_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 1, small(1), {}, keep=1)

    def interrupt(*_: object) -> Iterator[memoryview]:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_files, "_chunks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 2, small(2), {}, keep=1)
    assert folder_names(folder) == ["step-000000001"]


def test_too_little_space_is_noticed_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(folder, 1, small(1), {}, keep=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 98, 2))
    with pytest.raises(
        CheckpointError, match=rf"disk full while saving step 2 .*needs .* KB, free 2 bytes; .*valid checkpoint is {first}"
    ):
        save(folder, 2, small(2), {}, keep=1)
    assert folder_names(folder) == ["step-000000001"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("foreseen", [True, False], ids=["foreseen", "in the midst of writing"])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_what_is_needed(
    tiny_disk: Path, foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_disk / "checkpoints"
    first = save(folder, 1, small(1), {}, keep=1)
    if not foreseen:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    with pytest.raises(
        CheckpointError, match=rf"disk full while saving step 2 .*needs 4\.1 MB, free .*valid checkpoint is {first}"
    ):
        save(folder, 2, {"t": torch.zeros(1000, 1000)}, {}, keep=1)
    assert folder_names(folder) == [first.name]
    monkeypatch.undo()
    assert save(folder, 3, small(3), {}, keep=1).name == "step-000000003"


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_file_that_may_not_grow_leaves_the_older_checkpoint(folder: Path) -> None:
    first = save(folder, 1, small(1), {}, keep=1)
    code = """
import resource, sys, torch
from pathlib import Path
from rowstead.training.checkpoint import save
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save(Path(sys.argv[1]), 2, {"t": torch.zeros(1000, 1000)}, {}, keep=1)
except ValueError as error:
    print(type(error).__name__, error)
"""
    done = run_python(code, folder)
    assert "CheckpointError cannot save step 2" in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert f"the last valid checkpoint is {first}" in done.stdout
    assert folder_names(folder) == [first.name]


def test_a_folder_that_cannot_be_made_is_an_error_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save step 1 .*no earlier valid checkpoint"):
        save(tmp_path / "file" / "checkpoints", 1, {}, {}, keep=1)


def test_saving_takes_no_second_copy_of_a_table(folder: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from rowstead.records.usage import peak_memory_bytes
from rowstead.training.checkpoint import save
table = {"t": torch.ones(3_000_000, 16)}
save(Path(sys.argv[1]), 1, {"t": torch.ones(1)}, {}, keep=1)
before = peak_memory_bytes()
save(Path(sys.argv[1]), 2, table, {}, keep=1, shard_bytes=50 << 20)
print(peak_memory_bytes() - before)
"""
    done = run_python(code, folder)
    assert int(done.stdout) < 60e6, done.stderr  # the table has 192 MB


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from rowstead.training.checkpoint import load_latest, save
from rowstead.spec.errors import CheckpointError
folder = Path(sys.argv[1])
try:
    step = load_latest(folder, lambda text: sys.exit(text)).step
except CheckpointError:
    step = 0
print("ready", flush=True)
while True:
    step += 1
    tensors = {f"t{i}": torch.full((500, 16), float(step)) for i in range(6)}
    save(folder, step, tensors, {"step": step}, keep=2, shard_bytes=40_000)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_complete_checkpoint(folder: Path) -> None:
    moments = random.Random(3)
    reached = 0
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not any(path.name > f"step-{reached:09d}" for path in checkpoints_in(folder)):  # it has saved at least once
            assert time.monotonic() < deadline
        time.sleep(moments.uniform(0, 0.1))  # not to wait for something: the moment is what is drawn
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        latest = load_latest(folder, pytest.fail)
        assert latest.step == latest.facts["step"] > reached
        assert len(latest.tensors) == 6
        assert all(tensor.eq(latest.step).all() for tensor in latest.tensors.values())
        reached = latest.step
