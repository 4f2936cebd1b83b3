"""The description of an exported model from anybody is refused unless it is one, before its program is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import rowstead
from rowstead.spec.errors import RowsteadError


def field(key, value):
    def harm(folder: Path) -> None:
        plain = json.loads((folder / "inputs.json").read_bytes())
        plain[key] = value
        (folder / "inputs.json").write_text(json.dumps(plain))

    return harm


def written(text):
    return lambda folder: (folder / "inputs.json").write_text(text)


def replaced(name, make):
    def harm(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return harm


def linked(name):
    def harm(folder: Path) -> None:
        outside = shutil.move(folder / name, folder.parent / f"outside-{name}")
        (folder / name).symlink_to(outside)

    return harm


HARMS = {
    "not JSON": (written("{"), "cannot be read"),
    "a list": (written("[]"), "format"),
    "nested": (written("[" * 100_000), "cannot be read"),
    "huge": (lambda folder: os.truncate(folder / "inputs.json", 1 << 40), "more than"),
    "features a number": (field("features", 3), "features"),
    "features unknown": (field("features", {"other": []}), "features"),
    "rows a list": (field("num_rows", []), "`num_rows`"),
    "rows of no table": (field("num_rows", {}), "`num_rows`"),
    "label a number": (field("label", 5), "`label`"),
    "kinds a list": (field("id_kinds", ["text"]), "`id_kinds`"),
    "kinds unknown": (field("id_kinds", {"city": 5}), "`id_kinds`"),
    "digest a list": (field("sha256", []), "`sha256`"),
    "digest of nothing": (field("sha256", {}), "`sha256`"),
    "digest wrong": (field("sha256", {"program.pt2": "0" * 64}), "checksum"),
    "inputs a link": (linked("inputs.json"), "a symbolic link"),
    "program a link": (linked("program.pt2"), "a symbolic link"),
    "inputs a pipe": (replaced("inputs.json", os.mkfifo), "has no inputs.json"),
    "program a pipe": (replaced("program.pt2", os.mkfifo), "has no program.pt2"),
    "program a device": (replaced("program.pt2", lambda file: file.symlink_to("/dev/zero")), "has no program.pt2"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HARMS)
def test_a_crafted_export_is_refused_and_the_field_named(exported, tmp_path, name) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "exported"))
    harm, words = HARMS[name]
    harm(folder)
    with pytest.raises(RowsteadError) as caught:
        rowstead.load_exported(folder)
    assert words in str(caught.value)
