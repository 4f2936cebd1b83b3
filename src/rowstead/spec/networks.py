"""Networks: the built-in ones by name, and how `model.network` refers to one of the user's own.

`package.module:Class` names a class that Python can import, `path/to/file.py:Class` one in a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rowstead.spec.errors import RowsteadError, did_you_mean, require


@dataclass(frozen=True, kw_only=True)
class BuiltinNetwork:
    """A network of this package."""

    description: str
    """One line for the docs."""
    module: str
    """The class, `package.module:Class`."""


NETWORKS = {
    "dlrm": BuiltinNetwork(
        description="bottom MLP over dense features, interaction, top MLP", module="rowstead.nn.dlrm:DLRMNetwork"
    )
}


@dataclass(frozen=True)
class NetworkReference:
    """A network that `model.network` refers to: a class in a module or in a file."""

    source: str
    """Dotted name of a module, or path of a .py file."""
    class_name: str

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py")

    def read_sha256(self) -> str | None:
        """The checksum of the file as it is now; None for a module, and where there is no such file."""
        if not self.is_file or not Path(self.source).is_file():
            return None
        return hashlib.sha256(Path(self.source).read_bytes()).hexdigest()

    def __str__(self) -> str:
        return f"{self.source}:{self.class_name}"


def parse_network(text: str) -> NetworkReference:
    """What `model.network` refers to; a built-in name as the class behind it."""
    reference = NETWORKS[text].module if text in NETWORKS else text
    source, separator, class_name = reference.rpartition(":")
    if not separator:
        known = did_you_mean(text, NETWORKS) if text else "name one"
        require(False, "network", f"unknown network `{text}`: {known} Your own is `package.module:Class` or `file.py:Class`")
    require(class_name.isidentifier(), "network", f"`{class_name}` in `{text}` is not the name of a class")
    is_module = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    require(is_module, "network", f"`{source}` in `{text}` is neither a dotted module name nor a path that ends in .py")
    return NetworkReference(source, class_name)


def make_absolute(network: str, folders: Sequence[Path] = ()) -> str:
    """`network` with the path of its file made absolute: in the first of `folders` that has it, else in the working folder."""
    source, separator, class_name = network.rpartition(":")
    if not separator or not source.endswith(".py"):
        return network
    file = Path(source).expanduser()
    found = next((folder / file for folder in folders if (folder / file).is_file()), file)
    return f"{found.absolute()}:{class_name}"


def require_file(reference: NetworkReference) -> Path:
    """The file of a network; refused where it is missing."""
    file = Path(reference.source)
    if file.is_file():
        return file
    near = did_you_mean(file.name, sorted(path.name for path in file.parent.glob("*.py"))) if file.parent.is_dir() else ""
    raise RowsteadError(f"model.network: there is no file {file}{f': {near}' if near else ''}")
