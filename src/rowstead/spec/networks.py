"""Networks: the registry of the built-in ones, and how `model.network` refers to one of the user's own.

A new built-in network is an entry in `NETWORKS`, its options in `spec/network_options.py`, a module in `nn/` and a recipe of its name; planner and
configuration page follow from the entry. Tests ask for a plain version in `tests/nn/plain_networks.py` and a row in `docs/networks.md`.

`package.module:Class` names a class that Python can import, `path/to/file.py:Class` one in a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rowstead.spec.errors import RowsteadError, did_you_mean, require
from rowstead.spec.network_options import (
    AutoIntSpec,
    DCNv2Spec,
    DeepFMSpec,
    DLRMSpec,
    FinalMLPSpec,
    MaskNetSpec,
    NetworkSpec,
    WideDeepSpec,
    XDeepFMSpec,
)


@dataclass(frozen=True, kw_only=True)
class BuiltinNetwork:
    """A network of this package."""

    title: str
    """Its name as its authors write it."""
    description: str
    """One line for the docs."""
    paper: str
    """Where it is from."""
    module: str
    """The class, `package.module:Class`; it is built with (NetworkInputs, options)."""
    options: type[NetworkSpec]
    """The keys of `model.options`, and what the network computes."""
    reads: tuple[str, ...] = ("top",)
    """Keys of `model` that shape it, besides `width`; it does not read the other ones."""
    needs_equal_widths: bool = False
    """Whether every table must be as wide as model.width."""
    has_first_order: bool = False
    """Whether the last column of each row is a first-order weight."""
    has_wide_output: bool = False
    """Whether it can return `model.num_outputs` numbers for each example instead of a logit, for the heads of several labels."""


NETWORKS: dict[str, BuiltinNetwork] = {
    "dlrm": BuiltinNetwork(
        title="DLRM",
        description="bottom MLP over dense features, interaction, top MLP",
        paper="Naumov et al. 2019, arXiv:1906.00091",
        module="rowstead.nn.dlrm:DLRMNetwork",
        options=DLRMSpec,
        has_wide_output=True,
        reads=("bottom", "top", "interaction"),
    ),
    "wide_deep": BuiltinNetwork(
        title="Wide & deep",
        description="a linear model beside an MLP",
        paper="Cheng et al. 2016, arXiv:1606.07792",
        module="rowstead.nn.wide_deep:WideDeep",
        options=WideDeepSpec,
        has_first_order=True,
    ),
    "deepfm": BuiltinNetwork(
        title="DeepFM",
        description="a factorization machine beside an MLP",
        paper="Guo et al. 2017, arXiv:1703.04247",
        module="rowstead.nn.deepfm:DeepFM",
        options=DeepFMSpec,
        needs_equal_widths=True,
        has_first_order=True,
    ),
    "xdeepfm": BuiltinNetwork(
        title="xDeepFM",
        description="a linear model and a compressed interaction network beside an MLP",
        paper="Lian et al. 2018, arXiv:1803.05170",
        module="rowstead.nn.xdeepfm:XDeepFM",
        options=XDeepFMSpec,
        needs_equal_widths=True,
        has_first_order=True,
    ),
    "autoint": BuiltinNetwork(
        title="AutoInt",
        description="self-attention over the fields, beside an MLP",
        paper="Song et al. 2019, arXiv:1810.11921",
        module="rowstead.nn.autoint:AutoInt",
        options=AutoIntSpec,
        has_wide_output=True,
        needs_equal_widths=True,
    ),
    "dcnv2": BuiltinNetwork(
        title="DCNv2",
        description="a cross network beside or under an MLP",
        paper="Wang et al. 2021, arXiv:2008.13535",
        module="rowstead.nn.dcnv2:DCNv2",
        options=DCNv2Spec,
        has_wide_output=True,
    ),
    "masknet": BuiltinNetwork(
        title="MaskNet",
        description="blocks that multiply the fields by a mask computed from them, under an MLP",
        paper="Wang et al. 2021, arXiv:2102.07619",
        module="rowstead.nn.masknet:MaskNet",
        options=MaskNetSpec,
        has_wide_output=True,
        needs_equal_widths=True,
    ),
    "finalmlp": BuiltinNetwork(
        title="FinalMLP",
        description="two gated MLPs and a bilinear product of their outputs",
        paper="Mao et al. 2023, arXiv:2304.00902",
        module="rowstead.nn.finalmlp:FinalMLP",
        options=FinalMLPSpec,
    ),
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
