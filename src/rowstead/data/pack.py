"""Packs a log: its splits as a model reads them, in a folder of packed files with a pack.json that says what they are.

A folder is written under another name and renamed when it is complete, by one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rowstead.data.block import LogPiece
from rowstead.data.encode import SCALARS, Encoder
from rowstead.data.footers import first_line
from rowstead.data.packed_files import PackedColumns, PackedReader, PackedRows, PackedWriter
from rowstead.data.packed_source import PackedSplit
from rowstead.data.prefetch import map_ahead
from rowstead.data.source import LogSplit
from rowstead.data.transforms import DenseTransforms
from rowstead.data.write import Progress, disk_errors
from rowstead.kernels.cpu.bag_layout import to_example_major
from rowstead.records.files import fsync_folder, write_atomic
from rowstead.records.plain_files import is_count, parse_json, read_plain
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, Table
from rowstead.spec.heads import HEADS, TaskSpec
from rowstead.spec.parse import to_plain
from rowstead.spec.run import RunSpec

FORMAT = 2
INDEX = "pack.json"
_FILE = re.compile(r"(train|eval|test)(-bad)?-\d{5}\.arrow")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A packed log that was opened."""

    folder: Path
    splits: dict[str, PackedSplit]
    transforms: DenseTransforms
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is packed: the splits of a spec's log, opened."""

    spec: RunSpec
    splits: dict[str, LogSplit]
    learn: Callable[[], DenseTransforms]
    """Learns the dense transforms."""

    def facts(self) -> dict[str, Any]:
        """Everything that determines the packed rows."""
        spec, log = self.spec, self.spec.data.log
        rows = {feature: table.num_rows for table in spec.tables for feature in table.features}
        sparse = [
            {
                "name": feature.name,
                "column": feature.column,
                "hash": feature.hash,
                "max_ids": feature.max_ids,
                "num_rows": rows[i],
                **({"keeps": "last"} if feature.is_history else {}),
            }
            for i, feature in enumerate(spec.features.expanded_sparse())
        ]
        kind = next(name for name, value in vars(spec.data).items() if value is log)
        read = {name: value for name, value in to_plain(log).items() if name not in log.reading_keys}
        dense = spec.features.expanded_dense()
        learned = {"statistics_rows": spec.data.statistics_rows} if any(feature.needs_statistics for feature in dense) else {}
        files = {
            name: [
                {"name": os.path.basename(path), "bytes": found.size, "digest_of_end": found.end}
                for path, found in split.fingerprints.items()
            ]
            for name, split in self.splits.items()
        }
        plain: dict[str, Any] = {
            "data": {kind: read, **learned},
            "features": {"dense": to_plain(dense), "sparse": sparse},
            "files": files,
        }
        if spec.model.tasks:
            plain["labels"] = [{"column": task.label, "range": HEADS[task.loss].label_range} for task in spec.model.tasks]
        return dict(json.loads(json.dumps(plain)))


def find_columns(
    features: FeaturesSpec,
    tables: tuple[Table, ...],
    scalars: tuple[str, ...],
    *,
    num_groups: int = 0,
    tasks: Sequence[TaskSpec] = (),
) -> PackedColumns:
    """The columns of packed rows with these features."""
    last = {feature: table.num_rows - 1 for table in tables for feature in table.features}
    num_dense = len(features.expanded_dense())
    last_rows = tuple(last[i] for i in range(len(last)))
    ranges = tuple(HEADS[task.loss].label_range for task in tasks)
    return PackedColumns(num_dense=num_dense, last_rows=last_rows, scalars=scalars, num_groups=num_groups, label_ranges=ranges)


# Writing


def fill_cache(log: Log, folder: Path, on_message: Callable[[str], None]) -> None:
    """Pack the log into `folder` unless there is a pack already; other processes that want the same wait."""
    if (folder / INDEX).exists():
        return
    on_message(f"packing the log into {folder}: the first run with this data.cache does so once")
    with _hold(folder) as temporary:
        if temporary is not None:
            _write(log, temporary, lambda done, total: None)


def pack_log(log: Log, folder: Path, *, overwrite: bool = False, progress: Progress = lambda done, total: None) -> None:
    """Pack the log into a new `folder`; with `overwrite` in place of the pack that is there."""
    if (folder / INDEX).exists():
        others = [path.name for path in folder.iterdir() if path.name != INDEX and not _FILE.fullmatch(path.name)]
        if not overwrite or others:
            remedy = f"it also has `{others[0]}`: remove that" if overwrite else "pass --overwrite"
            raise DataError(f"{folder} is a packed log already: choose another folder, or {remedy}")
        with disk_errors(folder):
            (folder / INDEX).unlink()  # from here on it is no pack
            for path in folder.glob("*.arrow"):
                path.unlink()
    with _hold(folder) as temporary:
        if temporary is None:
            raise DataError(f"another process has packed a log into {folder} meanwhile: choose another folder")
        _write(log, temporary, progress)


@contextlib.contextmanager
def _hold(folder: Path) -> Iterator[Path | None]:
    """A folder to write to, which becomes `folder` at the end; None if another process has completed `folder` while this one waited.

    What a killed process has left is removed first.
    """
    folder = folder.absolute()
    temporary = folder.with_name(f"{folder.name}.packing")
    with disk_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} is not empty, and is no packed log: choose another folder, or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            temporary.mkdir(exist_ok=True)
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the lock of a killed process is free
            if (folder / INDEX).exists() or _is_same(temporary, descriptor):
                break
            os.close(descriptor)  # it was removed or renamed while this process waited
    try:
        if (folder / INDEX).exists():
            with contextlib.suppress(OSError):  # made by us or by others that wait; it stays as long as it is not empty
                temporary.rmdir()
            yield None
            return
        try:
            for left in temporary.iterdir():
                left.unlink()
            yield temporary
            with disk_errors(folder):
                os.rename(temporary, folder)
                fsync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether the folder that is open is still at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _write(log: Log, folder: Path, progress: Progress) -> None:
    """Write the splits and the index."""
    transforms, spec = log.learn(), log.spec
    encoder = Encoder(spec.features, spec.tables, transforms)
    totals = {name: split.source(encoder, seed=0).num_samples for name, split in log.splits.items()}
    done, index = 0, {}
    for name, split in log.splits.items():
        index[name] = _write_split(split, spec, encoder, folder, name, partial(_report, progress, done, sum(totals.values())))
        done += totals[name]
        if index[name]["num_rows"] + index[name]["num_bad"] != totals[name]:
            raise DataError(f"the {name} split changed while it was packed: it had {totals[name]:,} rows. Pack it again")
    plain = {"format": FORMAT, "facts": log.facts(), "transforms": transforms.to_plain(), "splits": index}
    with disk_errors(folder):
        write_atomic(folder / INDEX, json.dumps(plain) + "\n")


def _report(progress: Progress, before: int, total: int, num_rows: int) -> None:
    progress(before + num_rows, total)


def _write_split(
    split: LogSplit, spec: RunSpec, encoder: Encoder, folder: Path, name: str, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Write one split; what the index has to say of it."""
    bad: list[NDArray[np.int64]] = []
    num_read = 0
    writer: PackedWriter | None = None
    scalars: tuple[str, ...] = ()
    num_groups = 0
    try:
        made = map_ahead(partial(_pack_piece, encoder), split.pieces(), threads=max(2, usable_cores()), size=lambda item: 1)
        with contextlib.closing(made):
            for rows, names, good in made:
                if writer is None:
                    scalars = names
                    num_groups = 0 if rows.groups is None else rows.groups.shape[1]
                    writer = PackedWriter(
                        folder,
                        name,
                        find_columns(spec.features, spec.tables, scalars, num_groups=num_groups, tasks=spec.model.tasks),
                    )
                assert names == scalars, "all pieces have the same columns"
                num_rows = len(rows.lengths) if good is None else len(good)
                if good is not None:
                    bad.append(num_read + np.flatnonzero(~good))
                writer.write(rows)
                num_read += num_rows
                progress(num_read)
        assert writer is not None, "an opened split has rows"
        writer.close()
    finally:
        if writer is not None:
            writer.discard()
    files = list(writer.files)
    bad_rows = np.concatenate(bad) if bad else np.empty(0, np.int64)
    if len(bad_rows):
        files.append(f"{name}-bad-00000.arrow")
        with disk_errors(folder), pa.OSFile(str(folder / files[-1]), "wb") as file, pa.ipc.new_file(file, _BAD) as out:
            out.write_batch(pa.record_batch([pa.array(bad_rows)], schema=_BAD))
    sizes = [[file, (folder / file).stat().st_size] for file in files]
    plain = {"num_rows": writer.num_rows, "num_bad": len(bad_rows), "scalars": list(scalars), "files": sizes}
    return {**plain, "num_groups": num_groups}


_BAD = pa.schema([pa.field("row", pa.int64(), nullable=False)])


def _pack_piece(encoder: Encoder, make: Callable[[], LogPiece]) -> tuple[PackedRows, tuple[str, ...], NDArray[np.bool_] | None]:
    """The good rows of a piece, which scalars they have, and which rows were good."""
    piece = make()
    batch = encoder.encode(piece.block, None if piece.good is None else np.flatnonzero(piece.good))
    found = {name: value for name in SCALARS if (value := getattr(batch, name)) is not None}
    scalars = {
        name if value.dim() == 1 else f"{name}.{index}": column.numpy()
        for name, value in found.items()
        for index, column in enumerate([value] if value.dim() == 1 else value.T.contiguous())
    }
    names = tuple(scalars)
    sparse, num_samples = batch.sparse, batch.num_samples
    ids_dtype = find_columns(encoder.features, encoder.tables, names).ids_dtype
    if sparse.num_features:
        kind = np.int32 if ids_dtype == torch.int32 else np.int64
        ids, lengths, _ = to_example_major(sparse.ids.numpy(), sparse.offsets.numpy(), sparse.num_features, kind)
    else:
        ids, lengths = np.empty(0, np.int32), np.empty((num_samples, 0), np.int32)
    values = tuple(scalars.values())
    groups = None if batch.groups is None else batch.groups.numpy()
    return PackedRows(dense=batch.dense.numpy(), lengths=lengths, ids=ids, scalars=values, groups=groups), names, piece.good


# Reading


def open_pack(log: Log, folder: Path) -> Pack:
    """Open the packed log in `folder`, if it is that of `log`."""
    spec = log.spec
    again = f"Pack it again: `rowstead data pack RECIPE --out {folder} --overwrite`; or set data.cache to another folder"
    try:
        index = parse_json(read_plain(folder / INDEX))
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            found = index.get("format") if isinstance(index, dict) else index
            raise ValueError(f"its format is {found}, and this version reads {FORMAT}")
        facts = index["facts"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder / INDEX} cannot be read: {first_line(error)}. {again}") from None
    if difference := find_difference(facts, log.facts()):
        raise DataError(f"{folder} was packed for another recipe or log: {difference}. {again}")
    try:
        names = tuple(feature.name for feature in spec.features.expanded_dense())
        transforms = DenseTransforms.from_untrusted(index["transforms"], names)
        num_bytes = sum(int(size) for name in log.splits for _, size in index["splits"][name]["files"])
        splits = {name: _open_split(log, folder, name, index["splits"][name]) for name in log.splits}
    except (TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise DataError(f"{folder} is damaged: {first_line(error)}. {again}") from None
    except KeyError as error:
        raise DataError(f"{folder} is damaged: {INDEX} has no {error}. {again}") from None
    return Pack(folder=folder, splits=splits, transforms=transforms, num_bytes=num_bytes)


def _open_split(log: Log, folder: Path, name: str, plain: dict[str, Any]) -> PackedSplit:
    scalars = tuple(plain["scalars"])
    tasks = log.spec.model.tasks
    known = [f"{name}.{index}" if tasks and name != "weights" else name for name in SCALARS for index in range(len(tasks) or 1)]
    num_labels = [sum(scalar.startswith(f"{name}.") for scalar in scalars) for name in ("labels", "true_p")]
    is_whole = all(count in (0, len(tasks)) for count in num_labels)
    if scalars != tuple(scalar for scalar in dict.fromkeys(known) if scalar in scalars) or not is_whole:
        raise ValueError(f"the scalars of the {name} split are {scalars}")
    files = []
    for file, size in plain["files"]:
        if not (isinstance(file, str) and _FILE.fullmatch(file) and file.startswith(name) and is_count(size)):
            raise ValueError(f"{file} is no file of the {name} split")
        if (found := os.stat(folder / file, follow_symlinks=False).st_size) != size:
            raise ValueError(f"{file} has {found:,} bytes, and had {size:,}")
        files.append(file)
    files_spec = log.spec.data.files
    num_groups = len(files_spec.group_columns) if files_spec is not None and name != "train" else 0
    if plain["num_groups"] != num_groups:
        raise ValueError(f"the {name} split has {plain['num_groups']} columns of groups, and the recipe {num_groups}")
    columns = find_columns(log.spec.features, log.spec.tables, scalars, num_groups=num_groups, tasks=tasks)
    reader = PackedReader(folder, [file for file in files if "-bad-" not in file], columns)
    bad_rows = np.empty(0, np.int64)
    for file in files:
        if "-bad-" in file:
            with pa.memory_map(str(folder / file)) as mapped, pa.ipc.open_file(mapped) as opened:
                if opened.schema != _BAD:
                    raise ValueError(f"{file} has other columns than `row`")
                bad_rows = opened.read_all().column("row").to_numpy().copy()
    num_rows = reader.num_rows + len(bad_rows)
    rises = len(bad_rows) == 0 or (bad_rows[0] >= 0 and bad_rows[-1] < num_rows and bool((np.diff(bad_rows) > 0).all()))
    if (reader.num_rows, len(bad_rows)) != (plain["num_rows"], plain["num_bad"]) or not rises:
        raise ValueError(
            f"the {name} split has {reader.num_rows:,} rows and {len(bad_rows):,} bad ones, other than its index says"
        )
    return PackedSplit(reader=reader, bad_rows=bad_rows)


def find_difference(packed: Any, wanted: Any, path: str = "") -> str | None:
    """Where two JSON values differ first, in words; None if they are equal."""
    if isinstance(packed, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys((*packed, *wanted)):
            if difference := find_difference(packed.get(key), wanted.get(key), f"{path}.{key}" if path else str(key)):
                return difference
        return None
    if isinstance(packed, list) and isinstance(wanted, list):
        if len(packed) != len(wanted):
            return f"`{path}` had {len(packed)} entries and now has {len(wanted)}"
        return next(
            (
                found
                for i, pair in enumerate(zip(packed, wanted, strict=True))
                if (found := find_difference(*pair, f"{path}.{i}"))
            ),
            None,
        )
    return None if packed == wanted else f"`{path}` was {packed} and is now {wanted}"
