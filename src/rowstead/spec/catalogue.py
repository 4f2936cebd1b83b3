"""The catalogue: machines and software by name or file, and what-if changes to them."""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.machine import Machine
from rowstead.spec.parse import errors_in, find_file, parse, shipped_names, to_plain
from rowstead.spec.software import Software
from rowstead.spec.yaml_text import read_yaml

MACHINES = Path(__file__).parent.parent / "machines"
SOFTWARE = MACHINES / "software"


def machine_names() -> list[str]:
    """Names of the machines that are shipped."""
    return shipped_names(MACHINES)


HERE = "here"
"""The name of the machine that `rowstead calibrate` has measured here."""
MACHINE_VARIABLE = "ROWSTEAD_MACHINE"
"""Environment variable with the path of the file that describes this machine, if it is not in the default location."""


def calibrated_path(kind: str) -> Path:
    """Path of this machine's file: `cpu` for training on its processors, `cuda` on its GPU."""
    if given := os.environ.get(MACHINE_VARIABLE):
        return Path(given)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return folder / "rowstead" / f"{platform.node() or 'machine'}-{kind}.yaml"


def calibrated_machine(kind: str) -> Machine | None:
    """This machine as calibrated for training on `cpu` or `cuda`; None if it was not."""
    path = calibrated_path(kind)
    if not path.is_file():
        if os.environ.get(MACHINE_VARIABLE):
            raise RowsteadError(
                f"{MACHINE_VARIABLE} names `{path}`, where there is no file: run `rowstead calibrate`, or unset it"
            )
        return None
    machine = load_machine(str(path))
    return machine if (machine.accelerators is not None) == (kind == "cuda") else None


def load_machine(name_or_path: str, changes: Iterable[str] = ()) -> Machine:
    """A shipped machine by name, this one as `here`, or one of the user's own by path, with changes such as `network.bandwidth=4x`."""
    if name_or_path == HERE:
        found = next((path for kind in ("cuda", "cpu") if (path := calibrated_path(kind)).is_file()), None)
        if found is None:
            raise RowsteadError(
                f"this machine is not calibrated (there is no {calibrated_path('cpu')}): run `rowstead calibrate`"
            )
        name_or_path = str(found)
    path = find_file(name_or_path, "machine", MACHINES)
    plain = read_yaml(path)
    is_measured = isinstance(plain, dict) and "software" in plain
    with errors_in(path, "; if another version has written the file, run `rowstead calibrate` again" if is_measured else ""):
        described = parse(Machine, plain)
        machine = parse(Machine, functools.reduce(changed, changes, to_plain(described)))
    return _without_what_is_not_known(described, machine)


def _without_what_is_not_known(before: Machine, after: Machine) -> Machine:
    """A changed machine; with another number of accelerators or sockets, without power and price unless those were changed too."""
    if (before.num_devices, before.host.num_sockets) == (after.num_devices, after.host.num_sockets):
        return after
    names = ("power", "meter", "price")
    unknown: dict[str, Any] = {name: None for name in names if getattr(after, name) == getattr(before, name)}
    return replace(after, **unknown)


def machine_text(machine: Machine) -> str:
    """A machine as YAML, with four significant digits and without unknown fields."""
    return yaml.safe_dump(_short(to_plain(machine)), sort_keys=False, width=120, default_flow_style=None)


def _short(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _short(value) for name, value in node.items() if value is not None}
    if isinstance(node, list):
        return [_short(item) for item in node]
    if isinstance(node, float) and math.isfinite(node) and node:
        return round(node, 3 - math.floor(math.log10(abs(node))))
    return node


def load_software(name_or_path: str) -> Software:
    """A shipped description of software by name, or one of the user's own by path."""
    path = find_file(name_or_path, "software", SOFTWARE)
    with errors_in(path):
        return parse(Software, read_yaml(path))


def changed(plain: Any, change: str) -> Any:
    """The plain form of a machine with one field changed: `network.bandwidth=4x` multiplies, `host.num_cores=64` sets a number, and
    `peer_link.topology=ring` a topology.

    A key may be the beginning of a field's name, as long as no other field begins so. What hangs together changes together: a faster
    memory is so at random too, and more cores do more arithmetic.
    """
    key, separator, text = change.partition("=")
    keys = key.strip().removeprefix("machine.").split(".")
    if not separator or not all(keys):
        raise RowsteadError(f"cannot read `{change}`: write it as machine.network.bandwidth=4x, or with a number after `=`")
    return _with_change(plain, keys, text.strip(), change)


def _with_change(node: Any, keys: list[str], text: str, change: str) -> Any:
    if node is None:
        raise RowsteadError(f"`{change}`: this machine has no such part")
    if isinstance(node, list):
        return [_with_change(item, keys, text, change) for item in node]
    if not isinstance(node, dict):
        raise RowsteadError(f"`{change}` goes inside a number: shorten the key")
    head, rest = keys[0], keys[1:]
    matching = [name for name in node if name == head] or [name for name in node if name.startswith(head)]
    if len(matching) != 1:
        if matching:
            raise RowsteadError(f"`{change}`: `{head}` may be any of {', '.join(matching)}: write it out")
        known = [*node, *(name.split("_")[0] for name in node)]
        raise RowsteadError(f"`{change}`: no field `{head}`: {did_you_mean(head, dict.fromkeys(known))}")
    (name,) = matching
    value = node[name]
    if rest:
        return {**node, name: _with_change(value, rest, text, change)}
    if value is None:
        raise RowsteadError(f"`{change}`: this machine has no such part: its `{name}` is not given")
    if name == "topology":
        is_direct = text != "through_host"  # which has no links of its own
        return {**node, name: text, "bandwidth_bytes_per_s": node["bandwidth_bytes_per_s"] if is_direct else None}
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        inside = f": name one of its fields, {', '.join(value)}" if isinstance(value, dict) else ""
        raise RowsteadError(f"`{change}`: `{name}` is not a number and cannot be changed{inside}")
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        raise RowsteadError(f"cannot read `{text}` in `{change}`: give a factor such as 4x, or a number") from None
    new = value * factor if text.endswith("x") else factor
    if isinstance(value, int):
        if not math.isfinite(new):
            raise RowsteadError(f"`{change}`: `{name}` is a whole number, and cannot become {new:g}")
        new = round(new)
    return _hanging_together({**node, name: new}, name, new / value if value else 1.0)


def _hanging_together(node: dict[str, Any], name: str, ratio: float) -> dict[str, Any]:
    """A part with its dependent fields adjusted to a change of one field, so that the result is valid."""
    if not 0 < ratio < math.inf:
        return node
    if name == "bandwidth_bytes_per_s" and isinstance(node.get("random"), list):
        node["random"] = [{**rate, "bytes_per_s": rate["bytes_per_s"] * ratio} for rate in node["random"]]
        if node.get("cache_bandwidth_bytes_per_s") is not None:
            node["cache_bandwidth_bytes_per_s"] = max(node["cache_bandwidth_bytes_per_s"], node[name])
    if name == "num_cores" and isinstance(node.get("compute"), dict):
        rates = {key: value * ratio for key, value in node["compute"].items() if isinstance(value, (int, float))}
        node["compute"] = {**node["compute"], **rates}
    return node
