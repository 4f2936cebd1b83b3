"""The roster of addresses, and usage samples of roles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rowstead.fleet.role_usage import RoleSampler, UsageReader
from rowstead.fleet.roster import RoleAddress, RoleFiles, Roster, read_address
from rowstead.spec.errors import RowsteadError
from tests.small_runs import wait_until


def test_an_address_is_read_again_when_the_coordinator_has_moved_a_role(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    with pytest.raises(RowsteadError, match=r"fleet\.json is missing"):
        roster.find("sparse", 0)
    role = RoleAddress(kind="sparse", number=0, address="tcp://127.0.0.1:1", incarnation=0, pid=1)
    Roster(tmp_path).write([role], {"dtype": "float32"})
    address = roster.address("sparse", 0)
    assert address() == "tcp://127.0.0.1:1"
    moved = RoleAddress(kind="sparse", number=0, address="tcp://127.0.0.1:2", incarnation=1, pid=2)
    Roster(tmp_path).write([moved], {"dtype": "float32"})
    assert address() == "tcp://127.0.0.1:2"
    with pytest.raises(RowsteadError, match="has no dense 0"):
        roster.find("dense", 0)


def test_the_usage_of_a_role_is_summed_over_its_restarts(tmp_path: Path) -> None:
    (tmp_path / "roles").mkdir()
    files = RoleFiles(tmp_path, "trainer", 0)
    reader, trained = UsageReader(files.usage), {"num_samples": 0}

    def facts() -> dict[str, int]:
        trained["num_samples"] += 10
        return dict(trained)

    for incarnation in range(2):
        trained["num_samples"] = 0
        with RoleSampler(files.usage, facts, incarnation=incarnation, interval_s=0.01):
            wait_until(lambda: trained["num_samples"] >= 50, what="some samples")
        with open(files.usage, "a") as file:
            file.write('{"torn')
        reader.read()
        assert reader.last["num_samples"] == trained["num_samples"]
        assert (reader.rate("num_samples") or 0) > 0
        with open(files.usage, "a") as file:
            file.write("\n")
    lines = [json.loads(line) for line in files.usage.read_text().splitlines() if not line.startswith('{"torn')]
    per_start = [max(line["num_samples"] for line in lines if line["incarnation"] == start) for start in (0, 1)]
    assert reader.total("num_samples") == sum(per_start)
    assert reader.total("never measured") is None
    assert {"cpu_s", "rss_bytes", "time_s"} <= lines[0].keys()
    later = UsageReader(files.usage, from_now=True)
    later.read()
    assert later.last == {}


def test_a_sample_that_fails_is_skipped(tmp_path: Path) -> None:
    calls: list[int] = []

    def facts() -> dict[str, int]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("dictionary changed size during iteration")
        return {"num_samples": len(calls)}

    with RoleSampler(tmp_path / "usage.jsonl", facts, interval_s=0.01):
        wait_until(lambda: len(calls) > 4, what="samples after the one that failed")
    found = [json.loads(line)["num_samples"] for line in (tmp_path / "usage.jsonl").read_text().splitlines()]
    assert found == [number for number in range(1, len(calls) + 1) if number != 2]


@pytest.mark.parametrize("content", [b"[1]", b"{\xff}", b"{", b'{"kind": "reader"}', b"[" * 100_000])
def test_a_file_that_is_no_address_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = RoleFiles(tmp_path, "reader", 0).address
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(RowsteadError, match="is not the address of a role"):
        read_address(tmp_path, "reader", 0)
