"""A checkpoint from anybody, with right digests, is refused with its file and field named, and the older good one is used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rowstead.distributed.process_group import ProcessGroup
from rowstead.spec.errors import CheckpointError
from rowstead.stores.state import part_of
from rowstead.training import checkpoint_manifest
from rowstead.training.checkpoint import Checkpoint, load, load_latest, save
from rowstead.training.checkpoint_increment import Increment
from rowstead.training.checkpoint_manifest import MANIFEST, MANIFEST_DIGEST
from tests.training.crafted import Plain, edit_manifest, edit_shard, join_shard, replace_shard, seal, split_shard
from tests.training.test_checkpoint_pieces import column_wise, in_processes, save_in

ROWS, BIAS, STEP = "store.user.rows", "net.bias", "net.step"
SHARD, LAST = "shard-00000.safetensors", "shard-00004.safetensors"
Attack = Callable[[Path], Any]


def save_step(folder: Path, step: int, increment: Increment | None = None) -> Path:
    """A checkpoint with a table of 40 rows of 4 numbers, in several shards of at most 256 bytes."""
    rows = torch.full((40, 4), float(step))
    tensors = {BIAS: torch.full((3,), float(step)), STEP: torch.tensor(step)}
    return save(
        folder, step, tensors, {"a": 1}, keep=9, shard_bytes=256, parts=[part_of("user.rows", rows)], increment=increment
    )


@pytest.fixture
def attacked(tmp_path: Path) -> Path:
    """The newest of two good checkpoints, which a test changes."""
    save_step(tmp_path / "checkpoints", 100)
    return save_step(tmp_path / "checkpoints", 200)


def assert_refused(path: Path, *words: str) -> None:
    """The checkpoint is refused with these words, and the older one is used and the user told."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    for word in (path.name, *words):
        assert word in str(caught.value), f"{word!r} not in {caught.value}"
    reported: list[str] = []
    older = load_latest(path.parent, reported.append)
    assert older.step < 200
    assert older.tensors[ROWS].eq(older.step).all()
    assert len(reported) == 1
    assert reported[0].endswith("; trying the previous one")


def in_manifest(change: Callable[[Plain], Any]) -> Attack:
    return lambda path: edit_manifest(path, change)


def in_tensor(change: Callable[[Plain], Any], name: str = ROWS) -> Attack:
    return in_manifest(lambda manifest: change(manifest["tensors"][name]))


def in_header(change: Callable[[Plain], Any], file: str = SHARD, more: bytes = b"") -> Attack:
    return lambda path: edit_shard(path, file, change, more)


def named(name: str, target: Path | None = None) -> Attack:
    """Let the manifest call the first shard by another name, with the size and digest of what is there."""

    def attack(path: Path) -> None:
        content = (path / SHARD).read_bytes() if target is None else b"" if target == Path("/dev/zero") else target.read_bytes()
        if target is None and "\n" not in name and "\0" not in name:
            (path / name).resolve().parent.mkdir(exist_ok=True)
            (path / name).write_bytes(content)

        def change(manifest: Plain) -> None:
            del manifest["files"][SHARD]
            manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for entry in manifest["tensors"].values():
                entry["pieces"] = [[name if file == SHARD else file, *rest] for file, *rest in entry["pieces"]]

        edit_manifest(path, change)

    return attack


def linked(name: str) -> Attack:
    """Move a file out of the folder, and leave a symbolic link to it."""

    def attack(path: Path) -> None:
        outside = path.parent.parent / f"outside-{name}"
        shutil.move(path / name, outside)
        (path / name).symlink_to(outside)

    return attack


def replaced(name: str, make: Callable[[Path], Any]) -> Attack:
    def attack(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return attack


FILES = {
    "a shard is a symbolic link": (linked(SHARD), SHARD, "a symbolic link, not a plain file"),
    "the manifest is a symbolic link": (linked(MANIFEST), MANIFEST, "a symbolic link"),
    "the digest is a symbolic link": (linked(MANIFEST_DIGEST), MANIFEST_DIGEST, "a symbolic link"),
    "a shard is in the folder above": (named("../above.safetensors"), "`../above.safetensors`", "not the plain name"),
    "a shard is in a folder below": (named("sub/s.safetensors"), "`sub/s.safetensors`", "not the plain name"),
    "a shard is /etc/passwd": (named("/etc/passwd", Path("/etc/passwd")), "`/etc/passwd`", "not the plain name"),
    "a shard is /dev/zero": (named("/dev/zero", Path("/dev/zero")), "`/dev/zero`", "not the plain name"),
    "a shard is far above": (named("../../../../../../../etc/passwd", Path("/etc/passwd")), "not the plain name"),
    "a shard's name changes the terminal": (named("\x1b[2J\n.safetensors"), r"\x1b[2J\n", "not the plain name"),
    "a shard's name ends a string in C": (named("a\0.safetensors"), r"a\x00", "not the plain name"),
    "a shard is the manifest": (named(MANIFEST, Path("/dev/null")), "`manifest.json`", "not the plain name"),
    "a shard links to /dev/zero": (replaced(SHARD, lambda file: file.symlink_to("/dev/zero")), SHARD, "a symbolic link"),
    "a shard is a named pipe": (replaced(SHARD, os.mkfifo), SHARD, "a named pipe"),
    "the manifest is a named pipe": (replaced(MANIFEST, os.mkfifo), MANIFEST, "a named pipe"),
    "the digest is a named pipe": (replaced(MANIFEST_DIGEST, os.mkfifo), MANIFEST_DIGEST, "a named pipe"),
    "a shard is a folder": (replaced(SHARD, Path.mkdir), SHARD, "a folder"),
    "the manifest is huge": (lambda path: os.truncate(path / MANIFEST, 1 << 40), MANIFEST, "more than"),
    "the digest is huge": (lambda path: os.truncate(path / MANIFEST_DIGEST, 1 << 40), MANIFEST_DIGEST, "more than"),
}


def sealed(text: bytes) -> Attack:
    return lambda path: seal(path, text)


def field(key: str, value: Any) -> Attack:
    return in_manifest(lambda manifest: manifest.update({key: value}))


def file_field(key: str, value: Any) -> Attack:
    return in_manifest(lambda manifest: manifest["files"][SHARD].update({key: value}))


MANIFESTS = {
    "not JSON": (sealed(b"{"), "cannot be parsed"),
    "not UTF-8": (sealed('{"format": 2}'.encode("utf-16")), "cannot be parsed"),
    "a list": (sealed(b"[]"), "format"),
    "nested beyond the stack": (sealed(b"[" * 200_000 + b"]" * 200_000), "nested more than 64 deep"),
    "nested deeply": (field("facts", json.loads('{"a":' * 100 + "1" + "}" * 100)), "nested more than 64 deep"),
    "a key twice": (sealed(b'{"format": 2, "step": 1, "step": 2}'), "`step` is given twice"),
    "half a character": (sealed(b'{"format": 2, "a": "\\ud800"}'), "cannot be parsed"),
    "a number of 5000 digits": (sealed(b'{"format": 2, "step": ' + b"9" * 5000 + b"}"), "cannot be parsed"),
    "a number of 100 digits": (sealed(b'{"format": 2, "step": ' + b"9" * 100 + b"}"), "beyond 64 bits"),
    "format true": (field("format", True), "format `True`"),
    "format 2.0": (field("format", 2.0), "format `2.0`"),
    "step missing": (in_manifest(lambda manifest: manifest.pop("step")), "`step`"),
    "step NaN": (field("step", float("nan")), "`step`"),
    "step negative": (field("step", -1), "`step`"),
    "step true": (field("step", True), "`step`"),
    "step 1.5": (field("step", 1.5), "`step`"),
    "step of 64 bits": (field("step", 2**63), "`step`"),
    "step of another folder": (field("step", 7), "`step`"),
    "facts a list": (field("facts", []), "`facts`"),
    "files a list": (field("files", [SHARD]), "`files`"),
    "tensors a list": (field("tensors", [ROWS]), "`tensors`"),
    "a file's entry a list": (in_manifest(lambda manifest: manifest["files"].update({SHARD: []})), f"`files.{SHARD}`"),
    "a file's size true": (file_field("bytes", True), f"`files.{SHARD}.bytes`"),
    "a file's size negative": (file_field("bytes", -8), f"`files.{SHARD}.bytes`"),
    "a file's size infinite": (file_field("bytes", float("inf")), f"`files.{SHARD}.bytes`"),
    "a file's digest a number": (file_field("sha256", 5), f"`files.{SHARD}.sha256`"),
    "a file's digest short": (file_field("sha256", "ab"), f"`files.{SHARD}.sha256`"),
    "a tensor's entry null": (in_manifest(lambda manifest: manifest["tensors"].update({ROWS: None})), f"`tensors.{ROWS}`"),
}


def set_piece(index: int, piece: Any) -> Attack:
    return in_tensor(lambda entry: entry["pieces"].__setitem__(index, piece))


def overlap(entry: Plain) -> None:
    """The second piece claims the rows of the first: as many rows as before, and the rows of the second stay as memory was."""
    entry["pieces"][1][1:] = entry["pieces"][0][1:]


TENSORS = {
    "dtype unknown": (in_tensor(lambda entry: entry.update(dtype="F4")), f"`tensors.{ROWS}.dtype`"),
    "dtype a list": (in_tensor(lambda entry: entry.update(dtype=[])), f"`tensors.{ROWS}.dtype`"),
    "dtype lies": (in_tensor(lambda entry: entry.update(dtype="I32")), ROWS, "`dtype`"),
    "shape negative": (in_tensor(lambda entry: entry.update(shape=[-40, -4])), f"`tensors.{ROWS}.shape`"),
    "shape of floats": (in_tensor(lambda entry: entry.update(shape=[40.0, 4.0])), f"`tensors.{ROWS}.shape`"),
    "shape of bools": (in_tensor(lambda entry: entry.update(shape=[True]), BIAS), f"`tensors.{BIAS}.shape`"),
    "shape text": (in_tensor(lambda entry: entry.update(shape="44")), f"`tensors.{ROWS}.shape`"),
    "shape beyond memory": (in_tensor(lambda entry: entry.update(shape=[2**62, 4])), f"`tensors.{ROWS}.shape`"),
    "shape empty beyond memory": (in_tensor(lambda entry: entry.update(shape=[0, 2**62, 2**62])), f"`tensors.{ROWS}.shape`"),
    "shape of 9 dimensions": (in_tensor(lambda entry: entry.update(shape=[40, 4] + [1] * 7)), f"`tensors.{ROWS}.shape`"),
    "shape wider": (in_tensor(lambda entry: entry.update(shape=[40, 8])), ROWS, "`shape`"),
    "shape longer": (in_tensor(lambda entry: entry.update(shape=[80, 4])), f"`tensors.{ROWS}` have 160 of its 320 elements"),
    "a scalar with rows": (in_tensor(lambda entry: entry.update(shape=[1]), STEP), STEP, "`shape`"),
    "pieces a number": (in_tensor(lambda entry: entry.update(pieces=3)), f"`tensors.{ROWS}.pieces`"),
    "no pieces": (in_tensor(lambda entry: entry.update(pieces=[])), f"`tensors.{ROWS}` have 0 of its 160 elements"),
    "a gap": (in_tensor(lambda entry: entry["pieces"].pop(1)), f"`tensors.{ROWS}` have"),
    "an overlap": (in_tensor(overlap), f"`tensors.{ROWS}` overlap at row"),
    "a piece null": (set_piece(0, None), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece of 2": (set_piece(0, [SHARD, 0]), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece of 4": (set_piece(0, [SHARD, 0, 8, 0]), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece with NaN": (set_piece(0, [SHARD, 0, float("nan")]), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece from below 0": (set_piece(0, [SHARD, -8, 8]), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece backwards": (set_piece(0, [SHARD, 8, 0]), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece beyond the shape": (set_piece(1, [LAST, 8, 2**40]), f"`tensors.{ROWS}.pieces[1]`"),
    "a piece of an unknown file": (set_piece(0, ["other.safetensors", 0, 8]), f"`tensors.{ROWS}.pieces[0]`"),
    "a piece of a file that is a list": (set_piece(0, [[], 0, 8]), f"`tensors.{ROWS}.pieces[0]`"),
    "columns beyond the shape": (set_piece(0, [SHARD, 0, 8, 0, 9]), f"`tensors.{ROWS}.pieces[0]`"),
    "columns of a vector": (
        in_tensor(lambda entry: entry["pieces"].__setitem__(0, [SHARD, 0, 3, 0, 1]), BIAS),
        f"`tensors.{BIAS}.pieces[0]`",
        "columns",
    ),
    "encoded though it is full": (in_tensor(lambda entry: entry.update(encoding="int8")), f"`tensors.{ROWS}`"),
    "encoding unknown": (in_tensor(lambda entry: entry.update(encoding="rot13")), f"`tensors.{ROWS}.encoding`"),
    "encoding a list": (in_tensor(lambda entry: entry.update(encoding=[])), f"`tensors.{ROWS}.encoding`"),
    "touched though it is full": (in_tensor(lambda entry: entry.update(touched="touched.user")), f"`tensors.{ROWS}`"),
}


def both_pieces_in_one_file(entry: Plain) -> None:
    """Two pieces of the same bytes."""
    entry["pieces"][1][0] = entry["pieces"][0][0]


def entry_of(change: Callable[[Plain], Any], name: str = BIAS) -> Attack:
    return in_header(lambda header: change(header[name]))


def shift(by: int) -> Callable[[Plain], None]:
    return lambda entry: entry.update(data_offsets=[at + by for at in entry["data_offsets"]])


def raw_header(header: bytes) -> Attack:
    return lambda path: replace_shard(path, SHARD, join_shard(header, split_shard((path / SHARD).read_bytes())[1]))


SHARDS = {
    "two pieces in one file": (in_tensor(both_pieces_in_one_file), MANIFEST, "another piece"),
    "no header": (lambda path: replace_shard(path, SHARD, b"abc"), SHARD, "header"),
    "empty": (lambda path: replace_shard(path, SHARD, b""), SHARD, "header"),
    "a header beyond the file": (lambda path: replace_shard(path, SHARD, (1 << 40).to_bytes(8, "little")), SHARD, "header"),
    "a header beyond 63 bits": (lambda path: replace_shard(path, SHARD, b"\xff" * 8 + b"{}"), SHARD, "header"),
    "a header that is not JSON": (raw_header(b"{'a'}"), SHARD),
    "a header that is a list": (raw_header(b"[]"), SHARD, "header"),
    "a header in UTF-16": (raw_header("{}".encode("utf-16")), SHARD),
    "a header nested beyond the stack": (raw_header(b"[" * 100_000), SHARD, "nested"),
    "a tensor twice": (raw_header(b'{"net.bias": 1, "net.bias": 2}'), SHARD, "given twice"),
    "no tensors": (raw_header(b"{}"), SHARD, "no tensor"),
    "a tensor more": (in_header(lambda header: header.update(more=header[BIAS])), SHARD, "`more`"),
    "a tensor less": (in_header(lambda header: header.pop(BIAS)), SHARD, BIAS),
    "an entry null": (in_header(lambda header: header.update({BIAS: None})), SHARD, BIAS),
    "an entry without offsets": (entry_of(lambda entry: entry.pop("data_offsets")), SHARD, BIAS, "`data_offsets`"),
    "dtype lies": (entry_of(lambda entry: entry.update(dtype="I32")), SHARD, BIAS, "`dtype`"),
    "dtype a list": (entry_of(lambda entry: entry.update(dtype=[])), SHARD, BIAS, "`dtype`"),
    "shape lies": (entry_of(lambda entry: entry.update(shape=[1, 3])), SHARD, BIAS, "`shape`"),
    "shape of floats": (entry_of(lambda entry: entry.update(shape=[3.0])), SHARD, BIAS, "`shape`"),
    "offsets beyond the file": (entry_of(shift(1 << 30)), SHARD, BIAS, "`data_offsets`"),
    "offsets below 0": (entry_of(shift(-1 << 30)), SHARD, BIAS, "`data_offsets`"),
    "offsets with a hole": (in_header(lambda header: shift(4)(header[BIAS]), more=b"1234"), SHARD, "`data_offsets`"),
    "offsets of another tensor": (entry_of(lambda entry: entry.update(data_offsets=[0, 12])), SHARD, "`data_offsets`"),
    "offsets shorter than the shape": (entry_of(lambda entry: entry["data_offsets"].__setitem__(1, 9)), SHARD, "do not fit"),
    "offsets of text": (entry_of(lambda entry: entry.update(data_offsets=["0", "12"])), SHARD, "`data_offsets`"),
    "bytes after the last tensor": (in_header(lambda header: None, more=b"abcd"), SHARD, "bytes"),
}
ATTACKS = {
    f"{kind}: {name}": attack
    for kind, attacks in (("files", FILES), ("manifest", MANIFESTS), ("tensors", TENSORS), ("shard", SHARDS))
    for name, attack in attacks.items()
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_checkpoint_is_refused_and_the_older_one_is_used(attacked: Path, name: str) -> None:
    attack, *words = ATTACKS[name]
    attack(attacked)
    assert_refused(attacked, *words)


def test_a_checkpoint_that_is_a_link_is_refused(attacked: Path) -> None:
    elsewhere = attacked.rename(attacked.parent.parent / attacked.name)
    attacked.symlink_to(elsewhere)
    assert_refused(attacked, "no checkpoint at")


def test_a_file_in_place_of_a_checkpoint_is_refused(attacked: Path) -> None:
    shutil.rmtree(attacked)
    attacked.write_text("not a folder")
    assert_refused(attacked, "no checkpoint at")


def test_checking_a_hundred_thousand_pieces_is_quick(attacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces side by side, which are the slowest to check; one more is refused without checking any."""
    monkeypatch.setattr(checkpoint_manifest, "MAX_PIECES", 20_000)
    edit_manifest(
        attacked, lambda manifest: manifest["tensors"][ROWS].update(shape=[40, 10**6], pieces=[[SHARD, 0, 8]] * 20_001)
    )
    assert_refused(attacked, f"`tensors.{ROWS}.pieces`", "at most 20000")
    rectangles = [(0, 1, at, at + 1) for at in range(100_000)]
    assert checkpoint_manifest._cover_problem(rectangles, (1, 100_000)) is None


@pytest.mark.parametrize(
    ("rectangles", "problem"),
    [
        ([(0, 4, 0, 2), (0, 4, 2, 4)], None),
        ([(0, 2, 0, 4), (2, 4, 0, 2), (2, 4, 2, 4)], None),
        ([(0, 3, 0, 2), (0, 1, 2, 4), (1, 4, 2, 4), (3, 4, 0, 2)], None),
        ([(0, 4, 0, 3), (0, 4, 2, 3)], "overlap at row 0"),
        ([(0, 4, 0, 2), (2, 4, 0, 4)], "overlap at row 2"),
        ([(0, 3, 0, 4), (0, 1, 0, 4)], "overlap at row 0"),
        ([(0, 4, 1, 3), (0, 4, 0, 1), (0, 4, 2, 3)], "overlap at row 0"),
        ([(0, 4, 0, 2)], "have 8 of its 16 elements"),
    ],
)
def test_pieces_by_rows_and_columns_cover_a_table_once_or_are_refused(rectangles: list[Any], problem: str | None) -> None:
    assert checkpoint_manifest._cover_problem(rectangles, (4, 4)) == problem


def test_all_processes_of_a_job_refuse_a_crafted_checkpoint_together(tmp_path: Path) -> None:
    path = save_in(tmp_path, 3, column_wise)[0]
    assert isinstance(path, Path)
    edit_manifest(path, lambda manifest: manifest["tensors"][ROWS]["pieces"][1].__setitem__(slice(3, 5), [0, 2]))
    refusals = in_processes(2, lambda process_group: load(path, process_group=process_group))
    assert all(isinstance(one, CheckpointError) and "overlap at row 0" in str(one) for one in refusals)


def test_a_checkpoint_that_does_not_fit_one_process_is_used_by_none(attacked: Path) -> None:
    def work(process_group: ProcessGroup) -> int:
        def check(found: Checkpoint) -> None:
            if found.step == 200 and process_group.rank == 1:
                raise CheckpointError("it does not fit here")

        return load_latest(attacked.parent, lambda text: None, check=check, process_group=process_group).step

    assert in_processes(2, work) == [100, 100]
