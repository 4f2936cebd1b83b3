"""Checkpoints as an attacker would write them: any content, and every digest right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rowstead.training.checkpoint_manifest import MANIFEST, MANIFEST_DIGEST, digest_line

Plain = dict[str, Any]


def seal(path: Path, text: bytes) -> None:
    """Write a manifest of any content, with its digest."""
    (path / MANIFEST).write_bytes(text)
    (path / MANIFEST_DIGEST).write_bytes(digest_line(text))


def edit_manifest(path: Path, change: Callable[[Plain], Any]) -> None:
    """Change a checkpoint's manifest."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    change(manifest)
    seal(path, json.dumps(manifest).encode())


def replace_shard(path: Path, file: str, content: bytes) -> None:
    """Give a shard any content; size and digest in the manifest follow."""
    (path / file).unlink(missing_ok=True)
    (path / file).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(path, lambda manifest: manifest["files"].update({file: entry}))


def edit_shard(path: Path, file: str, change: Callable[[Plain], Any], more: bytes = b"") -> None:
    """Change the header of a shard, and add bytes to its data."""
    header, data = split_shard((path / file).read_bytes())
    change(header)
    replace_shard(path, file, join_shard(json.dumps(header).encode(), data + more))


def split_shard(content: bytes) -> tuple[Plain, bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_shard(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data
