"""MovieLens archives, made small in the official layouts, to Parquet."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rowstead.data.movielens import SCHEMA, convert
from rowstead.data.movielens_archive import year_of
from rowstead.data.order_test import OrderSample
from rowstead.spec.errors import DataError

GENRES = ("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy")
GENRES += ("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western")


def flags(*names: str) -> str:
    return "|".join("1" if genre in names else "0" for genre in GENRES)


ML_1M = {
    "ml-1m/README": b"read me",
    "ml-1m/movies.dat": (
        "1::Toy Story (1995)::Animation|Children's|Comedy\n2::Misérables, Les (1998)::Drama\n3952::Contender, The (2000)::Drama|Thriller\n"
    ).encode("latin-1"),
    "ml-1m/users.dat": b"1::F::1::10::48067\n2::M::56::16::70072-1234\n",
    "ml-1m/ratings.dat": b"1::1::5::978300760\n1::2::3::978302109\n2::3952::4::978301968\n2::1::1::978298413\n",
}
ML_100K = {
    "ml-100k/u.genre": "".join(f"{name}|{index}\n" for index, name in enumerate(GENRES)).encode() + b"\n",
    "ml-100k/u.item": (
        f"1|Toy Story (1995)|01-Jan-1995||http://us.imdb.com/M/title-exact?Toy|{flags('Animation', 'Comedy')}\n"
        f"267|unknown||||{flags('unknown')}\n"
        f"3|Amélie|25-Apr-2001||url|{flags('Drama')}\n"
    ).encode("latin-1"),
    "ml-100k/u.user": b"196|49|M|writer|55105\n22|25|F|student|T8H1N\n",
    "ml-100k/u.data": b"196\t1\t3\t881250949\n22\t267\t5\t878887116\n22\t3\t4\t878887117\n",
}
ML_LATEST = {
    "ml-latest-small/ratings.csv": b"userId,movieId,rating,timestamp\n1,1,4.0,964982703\n1,2,3.5,964981247\n2,11,0.5,964982224\n",
    "ml-latest-small/movies.csv": (
        "movieId,title,genres\r\n"
        "1,Toy Story (1995),Adventure|Animation\r\n"
        '2,"American President, The (1995)",Comedy\r\n'
        '11,"He said ""Où?""",(no genres listed)\r\n'
    ).encode(),
    "ml-latest-small/tags.csv": b"userId,movieId,tag,timestamp\n",
}


def zipped(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def rows_of(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob(f"{split}-*.parquet")) for row in pq.read_table(path).to_pylist()]


def converted(tmp_path: Path, files: Mapping[str, bytes], **options: Any) -> list[dict[str, Any]]:
    convert(zipped(tmp_path / "ml.zip", files), tmp_path / "out", **{"eval_fraction": 0, **options})
    return in_file_order(rows_of(tmp_path / "out"), files)


def in_file_order(rows: list[dict[str, Any]], files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The rows, which are shuffled, in the order of the archive's ratings."""
    lines = next(text for name, text in files.items() if "ratings" in name or name.endswith("u.data")).decode().splitlines()
    fields = [re.split(r"::|\t|,", line) for line in lines]
    order = [(user, item, time.strip()) for user, item, _, time in fields]
    return sorted(rows, key=lambda row: order.index((str(row["user"]), str(row["item"]), str(row["timestamp"]))))


def test_ml_1m(tmp_path: Path) -> None:
    rows = converted(tmp_path, ML_1M)
    assert rows[0] == {
        "label": 1, "rating": 5.0, "timestamp": 978300760, "hour": 22, "weekday": 6, "user": 1, "item": 1, "gender": "F", "age": 1,
        "occupation": "10", "zip_prefix": "480", "genres": ["Animation", "Children's", "Comedy"], "year": 1995.0,
    }  # fmt: skip
    assert [(r["label"], r["item"], r["gender"], r["zip_prefix"], r["year"]) for r in rows[1:]] == [
        (0, 2, "F", "480", 1998.0),
        (1, 3952, "M", "700", 2000.0),
        (0, 1, "M", "700", 1995.0),
    ]
    assert pq.read_schema(next((tmp_path / "out").iterdir())).equals(SCHEMA)


def test_ml_100k(tmp_path: Path) -> None:
    rows = converted(tmp_path, ML_100K)
    assert [(r["user"], r["age"], r["occupation"], r["zip_prefix"]) for r in rows] == [
        (196, 49, "writer", "551"),
        (22, 25, "student", "T8H"),
        (22, 25, "student", "T8H"),
    ]
    assert [(r["label"], r["genres"], r["year"]) for r in rows] == [
        (0, ["Animation", "Comedy"], 1995.0),
        (1, [], None),
        (1, ["Drama"], 2001.0),
    ]


def test_ml_latest(tmp_path: Path) -> None:
    rows = converted(tmp_path, ML_LATEST)
    assert [(r["label"], r["rating"], r["genres"], r["year"]) for r in rows] == [
        (1, 4.0, ["Adventure", "Animation"], 1995.0),
        (0, 3.5, ["Comedy"], 1995.0),
        (0, 0.5, [], None),
    ]
    assert {r["gender"] for r in rows} == {None}


@pytest.mark.parametrize("depth", [0, 1])
def test_an_unpacked_folder_is_read_like_its_zip(tmp_path: Path, depth: int) -> None:
    for name, content in ML_1M.items():
        path = tmp_path / "in" / (name if depth else name.split("/")[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    convert(tmp_path / "in", tmp_path / "folder", eval_fraction=0)
    assert in_file_order(rows_of(tmp_path / "folder"), ML_1M) == converted(tmp_path, ML_1M)


def many_ratings(num: int) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    lines = [f"{1 + i % 2}::{(1, 2, 3952)[i % 3]}::{rng.integers(1, 6)}::{rng.integers(9e8, 1e9)}\r\n" for i in range(num)]
    return {**ML_1M, "ml-1m/ratings.dat": "".join(lines).encode()}


def test_split_by_time_holds_out_the_latest(tmp_path: Path) -> None:
    everything = converted(tmp_path, many_ratings(1000))
    steps: list[tuple[int, int]] = []
    summary = convert(
        tmp_path / "ml.zip",
        tmp_path / "time",
        split="time",
        eval_fraction=0.2,
        chunk_bytes=500,
        progress=lambda *s: steps.append(s),
    )
    train, held = rows_of(tmp_path / "time"), rows_of(tmp_path / "time", "eval")
    assert summary.num_rows == {"train": 800, "eval": 200}
    assert max(r["timestamp"] for r in train) < min(r["timestamp"] for r in held)
    assert sorted(map(str, train + held)) == sorted(map(str, everything))
    assert steps[-1][0] == steps[-1][1]


def test_split_by_hash_keeps_a_pair_of_user_and_item_on_one_side(tmp_path: Path) -> None:
    users = "".join(f"{u}::F::1::10::48067\n" for u in range(1, 501)).encode()
    ratings = "".join(f"{1 + i % 500}::{1 + i // 500}::5::97830076{i % 10}\n" for i in range(1000)).encode()
    files = {**ML_1M, "ml-1m/users.dat": users, "ml-1m/ratings.dat": ratings}
    convert(zipped(tmp_path / "ml.zip", files), tmp_path / "a", eval_fraction=0.3, chunk_bytes=100)
    backwards = b"\n".join(ratings.splitlines()[::-1])
    convert(zipped(tmp_path / "ml.zip", {**files, "ml-1m/ratings.dat": backwards}), tmp_path / "b", eval_fraction=0.3)
    held = [{(r["user"], r["item"]) for r in rows_of(tmp_path / name, "eval")} for name in ("a", "b")]
    assert held[0] == held[1]
    assert 240 < len(held[0]) < 360


@pytest.mark.parametrize(
    ("files", "member", "extra", "words"),
    [
        (ML_1M, "ratings.dat", b"1::1::5\n", r"ratings.dat:line 5: wrong number of fields, expected 4 \('1::1::5'\)"),
        (ML_1M, "ratings.dat", b"1::x::5::9\n", "ratings.dat:line 5: not four numbers"),
        (ML_1M, "ratings.dat", b"1:1::5::9::\n", "ratings.dat:line 5: not four numbers"),
        (ML_1M, "ratings.dat", b"1::1::7::9\n", "ratings.dat:line 5: rating outside 0.5 to 5"),
        (ML_1M, "ratings.dat", b"1::77::5::9\n", "ratings.dat:line 5: unknown item .77 is not in the"),
        (ML_1M, "ratings.dat", b"9::1::5::9\n", "ratings.dat:line 5: unknown user .9 is not in the"),
        (ML_1M, "ratings.dat", b"\n", "ratings.dat:line 5: wrong number"),
        (ML_1M, "users.dat", b"3::F::1\n", "users.dat:line 3: wrong number of fields, expected 5"),
        (ML_1M, "users.dat", b"3::F::young::1::1\n", "users.dat:line 3: age is not a number"),
        (ML_1M, "users.dat", b"1::F::1::1::1\n", "users.dat:line 3: user given twice"),
        (ML_1M, "movies.dat", b"x::A::B\n", "movies.dat:line 4: item id is not a number"),
        (ML_100K, "u.item", b"9|a|b\n", "u.item:line 4: wrong number of fields, expected 24"),
        (ML_100K, "u.item", f"9|a|||u|{flags().replace('0', '2')}\n".encode(), "u.item:line 4: genre flag is not 0 or 1"),
        (ML_LATEST, "ratings.csv", b"1,1,five,9\n", "ratings.csv:line 5: not four numbers"),
        (ML_LATEST, "movies.csv", b"12,a\r\n", "movies.csv:line 5: wrong number of fields, expected 3"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(
    tmp_path: Path, files: dict[str, bytes], member: str, extra: bytes, words: str
) -> None:
    name = next(name for name in files if name.endswith(member))
    path = zipped(tmp_path / "ml.zip", {**files, name: files[name] + extra})
    with pytest.raises(DataError, match=words + ".*; fix it or pass --on-bad-row skip"):
        convert(path, tmp_path / "out", eval_fraction=0)
    summary = convert(path, tmp_path / "out", eval_fraction=0, on_bad_row="skip")
    assert summary.num_skipped == 1
    assert summary.num_rows["train"] == len(files[next(n for n in files if "ratings" in n or "u.data" in n)].splitlines()) - (
        files is ML_LATEST
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.txt": b""}, "is not a known MovieLens archive"),
        ({name: data for name, data in ML_1M.items() if "users" not in name}, r"looks like ml-1m .* has no users.dat"),
        ({**ML_LATEST, "ml-latest-small/ratings.csv": b"user,item\n"}, "line 1: expected the header userId"),
        ({**ML_LATEST, "ml-latest-small/movies.csv": b"a,b\n"}, "line 1: expected the header movieId"),
        ({**ML_LATEST, "ml-latest-small/movies.csv": b'movieId,title,genres\n1,"a,b\n'}, "not valid CSV"),
        (
            {**ML_LATEST, "ml-latest-small/movies.csv": b"movieId,title,genres\n1,\xff,b\n"},
            "movies.csv:line 2: not valid utf-8",
        ),
        ({**ML_1M, "ml-1m/ratings.dat": b""}, "the training split has no rows"),
        ({**ML_100K, "ml-100k/u.genre": b"Drama|1\n"}, "not numbered from 0"),
    ],
)
def test_archives_that_are_not_movielens_get_a_clear_error(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    with pytest.raises(DataError, match=words):
        converted(tmp_path, files)


def test_damaged_and_missing_files_get_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        convert(tmp_path / "none.zip", tmp_path / "out")
    (tmp_path / "not.zip").write_bytes(b"no zip")
    with pytest.raises(DataError, match="is not a zip file"):
        convert(tmp_path / "not.zip", tmp_path / "out")
    path = zipped(tmp_path / "ml.zip", many_ratings(500))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"cannot read .*ratings\.dat"):
        convert(path, tmp_path / "out")
    assert list((tmp_path / "out").glob("*")) == []


def test_member_names_are_never_used_as_paths(tmp_path: Path) -> None:
    files = {f"../../evil/{name.split('/')[1]}": data for name, data in ML_1M.items()}
    before = set(tmp_path.rglob("*"))
    assert len(converted(tmp_path, files)) == 4
    made = {path.relative_to(tmp_path).as_posix() for path in set(tmp_path.rglob("*")) - before}
    assert made == {"ml.zip", "out", "out/train-00000.parquet"}
    assert not (tmp_path.parent.parent / "evil").exists()


@pytest.mark.parametrize(
    ("title", "year"),
    [
        ("Toy Story (1995)", 1995),
        ("Doctor Who (2005-)", 2005),
        ("X (2001–2004) ", 2001),
        ("2001: A Space Odyssey", None),
        ("(1984) Big", None),
    ],
)
def test_year_of_a_title(title: str, year: int | None) -> None:
    assert year_of(title) == year


def test_rows_are_written_in_random_order(tmp_path: Path) -> None:
    users = "".join(f"{u}::F::1::10::48067\n" for u in range(1, 101)).encode()
    ratings = "".join(f"{1 + i // 60}::{(1, 2, 3952)[i % 3]}::{1 + i % 5}::{978300760 + i}\n" for i in range(6000)).encode()
    files = {**ML_1M, "ml-1m/users.dat": users, "ml-1m/ratings.dat": ratings}
    convert(zipped(tmp_path / "ml.zip", files), tmp_path / "a")
    for split in ("train", "eval"):
        rows = rows_of(tmp_path / "a", split)
        assert len({(row["user"], row["timestamp"]) for row in rows}) == len(rows)
    sample = OrderSample(["user"])
    sample.add([np.array([row["user"] for row in rows_of(tmp_path / "a")])])
    assert sample.find_clustered() == []
    convert(tmp_path / "ml.zip", tmp_path / "b", chunk_bytes=1000)
    assert rows_of(tmp_path / "b") == rows_of(tmp_path / "a"), "the same order however the file is read"
