"""An incremental checkpoint from anybody is refused unless it lies on the full one that it names, and an older one is used."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rowstead.spec.errors import CheckpointError
from rowstead.stores.state import part_of
from rowstead.training.checkpoint import load, load_latest, save
from rowstead.training.checkpoint_increment import Increment
from rowstead.training.checkpoint_manifest import MANIFEST
from rowstead.training.touched import RowBitmap
from tests.training.crafted import edit_manifest, join_shard, replace_shard, split_shard
from tests.training.test_hostile_checkpoints import ROWS, Attack, field, in_manifest, in_tensor, save_step


def bits(*rows: int) -> RowBitmap:
    flags = torch.zeros(40, dtype=torch.uint8)
    flags[list(rows)] = 1
    return RowBitmap(40, np.packbits(flags.numpy(), bitorder="little"))


def save_increment(folder: Path, step: int, base: str) -> Path:
    return save_step(folder, step, Increment(base=base, number=1, touched={"user": bits(1, 2, 39)}))


@pytest.fixture
def increment(tmp_path: Path) -> Path:
    """An incremental checkpoint of step 200, after two full ones of steps 50 and 100."""
    folder = tmp_path / "checkpoints"
    save_step(folder, 50)
    save_step(folder, 100)
    return save_increment(folder, 200, "step-000000100")


def base_field(key: str, value: Any) -> Attack:
    return in_manifest(lambda manifest: manifest["base"].update({key: value}))


def change_bitmap(change: Callable[[bytearray], None]) -> Attack:
    """Change the data of the bitmap of touched rows."""

    def attack(path: Path) -> None:
        file = json.loads((path / MANIFEST).read_bytes())["tensors"]["touched.user"]["pieces"][0][0]
        header, data = split_shard((path / file).read_bytes())
        changed = bytearray(data)
        first, last = header["touched.user"]["data_offsets"]
        some = changed[first:last]
        change(some)
        changed[first:last] = some
        replace_shard(path, file, join_shard(json.dumps(header).encode(), bytes(changed)))

    return attack


def rebase(path: Path, base: str) -> None:
    digest = hashlib.sha256((path.parent / base / MANIFEST).read_bytes()).hexdigest()
    edit_manifest(path, lambda manifest: manifest["base"].update(name=base, sha256=digest))


def save_beside(path: Path, save_other: Callable[[Path], Path]) -> Path:
    """Save another checkpoint into the folder of one of a later step, which saving there would delete."""
    elsewhere = path.parent.parent / "elsewhere"
    shutil.copytree(path.parent, elsewhere)
    other = save_other(elsewhere)
    shutil.move(other, path.parent / other.name)
    return path.parent / other.name


def chain(path: Path) -> None:
    """A full checkpoint below that is itself incremental."""
    other = save_beside(path, lambda folder: save_increment(folder, 150, "step-000000100"))
    rebase(path, other.name)


def cycle(path: Path) -> None:
    """Two incremental checkpoints of which each needs the other."""
    other = save_beside(path, lambda folder: save_increment(folder, 150, "step-000000100"))
    edit_manifest(other, lambda manifest: manifest["base"].update(name=path.name))
    rebase(path, other.name)


def base_of_later_step(path: Path) -> None:
    rebase(path, save_step(path.parent, 300).name)


def base_of(*shape: int, dtype: torch.dtype = torch.float32) -> Attack:
    """A full checkpoint below whose table has another shape or dtype."""

    def attack(path: Path) -> None:
        tensors = {ROWS: torch.zeros(shape, dtype=dtype)}
        rebase(path, save_beside(path, lambda folder: save(folder, 150, tensors, {}, keep=9)).name)

    return attack


def fewer_bits(content: bytearray) -> None:
    content[0] = 0


INCREMENTS = {
    "of itself": (base_field("name", "step-000000200"), "`base.name`"),
    "of a folder above": (base_field("name", "../step-000000100"), "`base.name`"),
    "of an absolute path": (base_field("name", "/tmp/step-000000100"), "`base.name`"),
    "of a list": (base_field("name", []), "`base.name`"),
    "of a missing one": (base_field("name", "step-000000099"), "step-000000099"),
    "of another digest": (base_field("sha256", "0" * 64), "another digest"),
    "of a digest that is none": (base_field("sha256", None), "`base.sha256`"),
    "number 0": (base_field("number", 0), "`base.number`"),
    "number true": (base_field("number", True), "`base.number`"),
    "number NaN": (base_field("number", float("nan")), "`base.number`"),
    "base a list": (field("base", []), "`base`"),
    "in a chain": (chain, "must be a full checkpoint"),
    "in a cycle": (cycle, "must be a full checkpoint"),
    "of a later step": (base_of_later_step, "an earlier step", "step-000000300"),
    "of other tables": (base_of(40, 5), ROWS, "dtype and width"),
    "of another dtype": (base_of(40, 4, dtype=torch.float64), ROWS, "dtype and width"),
    "of fewer rows": (base_of(30, 4), "`touched.user`"),
    "without touched rows": (in_tensor(lambda entry: entry.pop("touched")), f"`tensors.{ROWS}.touched`"),
    "touched in a list": (in_tensor(lambda entry: entry.update(touched=[])), f"`tensors.{ROWS}.touched`"),
    "touched as other rows": (in_tensor(lambda entry: entry.update(touched=ROWS)), f"`tensors.{ROWS}.touched`"),
    "without a bitmap": (in_manifest(lambda manifest: manifest["tensors"].pop("touched.user")), "tensors.touched.user"),
    "with fewer bits": (change_bitmap(fewer_bits), "`touched.user` does not match"),
    "encoded otherwise": (in_tensor(lambda entry: entry.update(encoding="int8")), ROWS, "`dtype`"),
    "encoded as fp16": (in_tensor(lambda entry: entry.update(encoding="fp16")), ROWS, "`dtype`"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", INCREMENTS)
def test_a_crafted_increment_is_refused_and_an_older_checkpoint_is_used(increment: Path, name: str) -> None:
    attack, *words = INCREMENTS[name]
    attack(increment)
    with pytest.raises(CheckpointError) as caught:
        load(increment)
    for word in (increment.name, *words):
        assert word in str(caught.value), f"{word!r} not in {caught.value}"
    for other in ("step-000000150", "step-000000300"):
        shutil.rmtree(increment.parent / other, ignore_errors=True)
    reported: list[str] = []
    assert load_latest(increment.parent, reported.append).step == 100
    assert [increment.name in text for text in reported] == [True]


def test_bits_for_rows_that_the_table_does_not_have_are_refused(tmp_path: Path) -> None:
    assert RowBitmap(36, bits(1, 39).bits).has_rows_beyond
    assert not RowBitmap(36, bits(1, 35).bits).has_rows_beyond
    assert not RowBitmap(40, bits(39).bits).has_rows_beyond
    base = save(tmp_path, 1, {"store.user.rows": torch.zeros(36, 4)}, {}, keep=9)
    path = save(
        tmp_path,
        2,
        {},
        {},
        keep=9,
        parts=[part_of("user.rows", torch.ones(36, 4))],
        increment=Increment(base=base.name, number=1, touched={"user": RowBitmap(36, bits(1, 2, 35).bits)}),
    )
    assert load(path).tensors[ROWS][[0, 1, 2, 35], 0].tolist() == [0, 1, 1, 1]

    def move_last_bit(content: bytearray) -> None:
        content[4] = 0b0010_0000

    change_bitmap(move_last_bit)(path)
    with pytest.raises(CheckpointError, match=r"`touched\.user` does not match the rows"):
        load(path)
