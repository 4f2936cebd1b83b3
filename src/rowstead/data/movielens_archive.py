"""Reads a MovieLens archive, zipped or unpacked: its layout, users and movies.

Member names are untrusted: they are only compared and read, never used as paths to write to.
"""

from __future__ import annotations

import csv
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowstead.data.lines import BadLines
from rowstead.spec.errors import DataError

MAX_SIDE_FILE_BYTES = 256 << 20
"""Limit for files of users and movies, which are read whole; official ones are far smaller."""
NO_GENRE = ("(no genres listed)", "unknown", "")
ZIP_PREFIX = 3
_MAX_ID = 2**63 - 1


class Archive:
    """The files of a zip, or of a folder and its direct subfolders, by base name."""

    def __init__(self, source: Path, files: Mapping[str, tuple[str, int]], archive: zipfile.ZipFile | None) -> None:
        self.source, self._files, self._zip = source, files, archive
        self.names = frozenset(files)

    @property
    def num_bytes(self) -> int:
        """Size of the zip, or of all files in the folder."""
        return self.source.stat().st_size if self._zip else sum(size for _, size in self._files.values())

    def size(self, name: str) -> int:
        return self._files[name][1]

    def label(self, name: str) -> str:
        """A file's name in messages."""
        return f"{self.source}/{self._files[name][0]}"

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """The bytes of a file; a damaged archive raises a DataError."""
        inner = self._files[name][0]
        try:
            with self._zip.open(inner) if self._zip else (self.source / inner).open("rb") as stream:
                yield cast(BinaryIO, stream)
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            # RuntimeError: encrypted, or an unsupported compression
            raise DataError(f"cannot read {self.label(name)}: {error}") from error

    def text(self, name: str, encoding: str) -> str:
        """A small file as text."""
        with self.open(name) as stream:
            data = stream.read(MAX_SIDE_FILE_BYTES + 1)
        if len(data) > MAX_SIDE_FILE_BYTES:
            raise DataError(
                f"{self.label(name)} is larger than {MAX_SIDE_FILE_BYTES >> 20} MiB; this is not a MovieLens archive"
            )
        try:
            return data.decode(encoding)
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            raise DataError(f"{self.label(name)}:line {line}: not valid {encoding} ({error.reason})") from error


@contextmanager
def open_archive(source: str | os.PathLike[str]) -> Iterator[Archive]:
    """A zip or a folder as an Archive."""
    path = Path(source)
    if path.is_dir():
        found = sorted(p for p in (*path.glob("*"), *path.glob("*/*")) if p.is_file())
        yield Archive(path, _by_base_name((str(p.relative_to(path)), p.stat().st_size) for p in found), None)
        return
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a MovieLens zip, such as ml-1m.zip, or its unpacked folder")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path} is not a zip file ({error}); give a MovieLens zip as downloaded, such as ml-1m.zip") from error
    with archive:
        inside = [(member.filename, member.file_size) for member in archive.infolist() if not member.is_dir()]
        yield Archive(path, _by_base_name(inside), archive)


def _by_base_name(files: Iterable[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Files by base name; of several, the least deeply nested one."""
    found: dict[str, tuple[str, int]] = {}
    for name, size in sorted(files, key=lambda file: file[0].count("/")):
        found.setdefault(name.rsplit("/", 1)[-1], (name, size))
    return found


@dataclass(frozen=True, kw_only=True)
class ArchiveLayout:
    """One of the layouts of GroupLens's archives."""

    name: str
    ratings: str
    items: str
    users: str | None
    separator: bytes
    encoding: str
    ratings_header: bytes = b""
    genres: str | None = None

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(name for name in (self.ratings, self.items, self.users, self.genres) if name is not None)


LAYOUTS = (
    ArchiveLayout(
        name="ml-1m", ratings="ratings.dat", items="movies.dat", users="users.dat", separator=b"::", encoding="latin-1"
    ),
    ArchiveLayout(
        name="ml-100k", ratings="u.data", items="u.item", users="u.user", genres="u.genre", separator=b"\t", encoding="latin-1"
    ),
    ArchiveLayout(
        name="ml-latest",
        ratings="ratings.csv",
        items="movies.csv",
        users=None,
        separator=b",",
        encoding="utf-8-sig",
        ratings_header=b"userId,movieId,rating,timestamp",
    ),
)


def find_layout(archive: Archive) -> ArchiveLayout:
    """The layout of an archive; raises a DataError that says what is missing."""
    layout = next((layout for layout in LAYOUTS if layout.ratings in archive.names), None)
    if layout is None:
        known = "; ".join(f"{layout.name}: {', '.join(layout.members)}" for layout in LAYOUTS)
        raise DataError(f"{archive.source} is not a known MovieLens archive. Expected one of: {known}")
    missing = [name for name in layout.members if name not in archive.names]
    if missing:
        raise DataError(
            f"{archive.source} looks like {layout.name} (it has {layout.ratings}) but has no {', '.join(missing)}; "
            "download it again. ml-10m is not supported"
        )
    return layout


@dataclass(frozen=True)
class Entities:
    """The users or movies of an archive."""

    ids: list[int]
    fields: pa.Table
    """One row per id: `gender`, `age`, `occupation` and `zip_prefix` of a user, `genres` and `year` of a movie."""

    def find(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each id, -1 for an unknown one."""
        rows = pc.index_in(pa.array(wanted), value_set=pa.array(self.ids, pa.int64()))
        return np.asarray(rows.fill_null(-1).to_numpy(), np.int64)


Fields = TypeVar("Fields")


class _FieldError(Exception):
    """A line that cannot be used, and why."""


def read_users(archive: Archive, layout: ArchiveLayout, bad: BadLines) -> Entities | None:
    """The users; None for layouts without a users file."""
    if layout.users is None:
        return None
    order = (0, 2, 1, 3, 4) if layout.name == "ml-100k" else (0, 1, 2, 3, 4)  # id, age, gender, occupation, zip
    separator = "|" if layout.name == "ml-100k" else "::"
    kept: dict[int, dict[str, str | int | None]] = {}
    for line, text in enumerate(_lines(archive.text(layout.users, layout.encoding)), 1):
        try:
            parts = text.split(separator)
            if len(parts) != 5:
                raise _FieldError("wrong number of fields, expected 5", f"{len(parts)} in the line {text[:60]!r}")
            identity, gender, age, occupation, code = (parts[i] or None for i in order)
            fields = {"gender": gender, "age": _number("age", age or "", 2**15 - 1), "occupation": occupation}
            _keep(kept, "user", identity or "", fields | {"zip_prefix": code and code[:ZIP_PREFIX]})
        except _FieldError as error:
            bad.add(archive.label(layout.users), line, *error.args)
    kinds = pa.schema({"gender": pa.string(), "age": pa.int16(), "occupation": pa.string(), "zip_prefix": pa.string()})
    return Entities(list(kept), pa.Table.from_pylist(list(kept.values()), kinds))


def read_items(archive: Archive, layout: ArchiveLayout, bad: BadLines) -> Entities:
    """The movies, with genres and year."""
    kept: dict[int, dict[str, list[str] | float | None]] = {}
    names = _genre_names(archive, layout)
    for line, parts in _item_lines(archive, layout):
        try:
            expected = 5 + len(names) if layout.genres else 3
            if len(parts) != expected:
                raise _FieldError(
                    f"wrong number of fields, expected {expected}", f"{len(parts)} in the line {'|'.join(parts)[:60]!r}"
                )
            if layout.genres:
                flags = parts[5:]
                if any(flag not in ("0", "1") for flag in flags):
                    raise _FieldError("genre flag is not 0 or 1", f"{''.join(flags)!r}")
                genres = [name for name, flag in zip(names, flags, strict=True) if flag == "1"]
                year = year_of(parts[1]) or year_of(f"({parts[2][-4:]})")
            else:
                genres, year = parts[2].split("|"), year_of(parts[1])
            _keep(kept, "item", parts[0], {"genres": [name for name in genres if name not in NO_GENRE], "year": year})
        except _FieldError as error:
            bad.add(archive.label(layout.items), line, *error.args)
    kinds = pa.schema({"genres": pa.list_(pa.string()), "year": pa.float32()})
    return Entities(list(kept), pa.Table.from_pylist(list(kept.values()), kinds))


def year_of(title: str) -> float | None:
    """The year in brackets at the end of a title, such as `Toy Story (1995)`; the first year of a range."""
    found = re.search(r"\((\d{4})(?:[-–]\s*(?:\d{4})?)?\)\W*$", title)
    return float(found.group(1)) if found else None


def _lines(text: str) -> list[str]:
    """Lines ending in LF or CRLF; other line separators, which titles may contain, are kept."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _item_lines(archive: Archive, layout: ArchiveLayout) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each line of the movies file."""
    text = archive.text(layout.items, layout.encoding)
    if not layout.ratings_header:
        separator = "|" if layout.genres else "::"
        lines = _lines(text.rstrip("\n") if layout.genres else text)  # u.item ends in an empty line
        for line, content in enumerate(lines, 1):
            yield line, content.split(separator)
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if header != ["movieId", "title", "genres"]:
            raise DataError(f"{archive.label(layout.items)}:line 1: expected the header movieId,title,genres, found {header}")
        for parts in reader:
            yield reader.line_num, parts
    except csv.Error as error:
        raise DataError(f"{archive.label(layout.items)}:line {reader.line_num}: not valid CSV ({error})") from error


def _genre_names(archive: Archive, layout: ArchiveLayout) -> list[str]:
    """Genre names of ml-100k's flags, in order."""
    if layout.genres is None:
        return []
    names: dict[int, str] = {}
    for line, text in enumerate(_lines(archive.text(layout.genres, layout.encoding)), 1):
        name, _, number = text.rpartition("|")
        if not text.strip():
            continue
        if not name or not number.isdecimal() or int(number) in names:
            raise DataError(f"{archive.label(layout.genres)}:line {line}: expected `genre|number`, found {text[:60]!r}")
        names[int(number)] = name
    if sorted(names) != list(range(len(names))):
        raise DataError(f"{archive.label(layout.genres)}: the genres are not numbered from 0 without gaps")
    return [names[i] for i in range(len(names))]


def _number(what: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > most:
        raise _FieldError(f"{what} is not a number", f"{text[:40]!r}")
    return int(text)


def _keep(kept: dict[int, Fields], what: str, identity: str, fields: Fields) -> None:
    number = _number(f"{what} id", identity, _MAX_ID)
    if number in kept:
        raise _FieldError(f"{what} given twice", str(number))
    kept[number] = fields
