"""The bench of faults: schedules are drawn as they say, and the oracle notices what is planted."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import fault_oracle, fault_recipe
from benchmarks.fault_links import Links
from benchmarks.fault_oracle import (
    Reference,
    check,
    check_end,
    check_files,
    check_ne,
    check_updates,
    check_weights,
    read_reference,
)
from benchmarks.fault_runs import Part, Result, disturbed
from benchmarks.fault_schedules import (
    DISK,
    FORK_SERVER,
    MAIN,
    MODES,
    RANKS,
    Fault,
    Mode,
    Schedule,
    draw_schedule,
    roles_of,
)
from rowstead.fleet.work_counts import describe_lost_dense_steps
from rowstead.run import train
from tests.small_runs import small_spec, wait_until

SEEDS = range(600)

# Schedules


def test_a_seed_draws_the_same_schedule_again_and_seeds_take_the_modes_in_turns() -> None:
    schedules = [draw_schedule(seed) for seed in SEEDS]
    assert schedules == [draw_schedule(seed) for seed in SEEDS]
    assert [schedule.mode for schedule in schedules[:4]] == [*MODES, MODES[0]]
    assert len({schedule.faults for schedule in schedules}) == len(schedules)
    assert draw_schedule(7, modes=("fleet",)).mode == "fleet"


def victims_in(schedule: Schedule) -> set[str]:
    """All that a schedule may hit."""
    if schedule.mode == "single":
        return {MAIN, DISK}
    return {MAIN, DISK, *RANKS} if schedule.mode == "processes" else {MAIN, DISK, FORK_SERVER, *roles_of(schedule.fleet)}


def test_faults_come_in_order_and_hit_what_the_run_has() -> None:
    for schedule in map(draw_schedule, SEEDS):
        shares = [fault.at for fault in schedule.faults]
        assert shares == sorted(shares)
        assert shares[0] >= 0
        assert shares[-1] < 1
        for fault in schedule.faults:
            assert fault.victims
            assert set(fault.victims) <= victims_in(schedule), schedule
            assert (fault.signal is not None) == fault.kind.startswith("stop")
            if fault.duration_s is None and fault.kind not in ("kill", "stop"):
                assert fault.kind == "freeze"
                assert MAIN not in fault.victims, "nobody would find a frozen coordinator"
            assert fault.describe() in schedule.describe()


def test_every_kind_of_fault_and_every_victim_comes_up_and_several_at_once_too() -> None:
    seen = {mode: [s for s in map(draw_schedule, SEEDS) if s.mode == mode] for mode in MODES}
    common = {"kill", "stop", "stop and kill", "freeze", "slow", "full disk"}
    kinds = {mode: {fault.kind for s in schedules for fault in s.faults} for mode, schedules in seen.items()}
    assert kinds == {"single": common, "processes": common | {"cut link"}, "fleet": common | {"cut link", "slow link"}}
    for mode, schedules in seen.items():
        assert {victim for s in schedules for fault in s.faults for victim in fault.victims} == set().union(
            *map(victims_in, schedules)
        )
        if mode != "single":
            assert any(len(fault.victims) >= 3 and fault.kind == "kill" for s in schedules for fault in s.faults)
    assert any(fault.kind == "freeze" and fault.duration_s is None for s in seen["fleet"] for fault in s.faults)


# The oracle


def test_a_weight_that_differs_in_its_last_bit_is_noticed() -> None:
    weights = {"net.a": torch.rand(5), "store.t.rows": torch.rand(3, 2)}
    assert not check_weights(weights, {name: value.clone() for name, value in weights.items()})
    other = {name: value.clone() for name, value in weights.items()}
    other["store.t.rows"][1, 1] = torch.nextafter(other["store.t.rows"][1, 1], torch.tensor(2.0))
    (finding,) = check_weights(weights, other)
    assert (finding.category, "store.t.rows" in finding.text) == ("wrong weights", True)
    assert check_weights(weights, {"net.a": weights["net.a"]}), "a tensor is missing"


@pytest.mark.parametrize(
    ("updates", "num_lost", "num_repeated", "is_right"),
    [
        ([100, 100], 0, 0, True),
        ([100, 97], 3, 0, True),  # lost, and counted
        ([100, 97], 2, 0, False),  # one is missing
        ([100, 97], 0, 5, False),
        ([104, 100], 0, 5, True),  # batches of a killed trainer, trained on again
        ([106, 100], 0, 5, False),  # more than were repeated
        ([101, 99], 0, 0, False),  # one lost, and another applied twice
    ],
)
def test_an_update_that_is_neither_applied_nor_counted_is_noticed_and_so_is_one_too_many(
    updates: list[int], num_lost: int, num_repeated: int, is_right: bool
) -> None:
    findings = check_updates(updates, num_lost=num_lost, num_steps=100, num_repeated=num_repeated)
    assert [finding.category for finding in findings] == ([] if is_right else ["unexplained loss"])


def test_a_worse_model_is_noticed_unless_lost_updates_explain_it() -> None:
    assert not check_ne(0.8824, 0.88, 0.0)
    assert check_ne(0.8828, 0.88, 0.0)
    assert not check_ne(0.8828, 0.88, 0.05)


def part(tmp_path: Path, code: int, printed: str, **fields: object) -> Part:
    log = tmp_path / "printed.txt"
    log.write_text(printed)
    return Part(0, {}, 0.0, log, code=code, **fields)  # type: ignore[arg-type]


LOST = "process 0 lost its connection to the others before all had stopped: progress since the last checkpoint is lost"


@pytest.mark.parametrize(
    ("code", "printed", "fields", "is_right"),
    [
        (0, "", {}, True),
        (0, "Traceback (most recent call last)", {}, False),
        (-9, "", {"sent": {signal.SIGKILL}}, True),
        (-9, "", {}, False),
        (143, "step 40 of 100\nstopped: the checkpoint is saved", {"sent": {signal.SIGTERM}}, True),
        (143, "step 40 of 100", {"sent": {signal.SIGTERM}}, False),  # nothing is said of the checkpoint
        (143, "step 40 of 100\nstopped: the checkpoint is saved", {"sent": {signal.SIGHUP}}, False),
        (143, f"step 40 of 100\n{LOST}", {"sent": {signal.SIGTERM}, "was_cut": True}, True),
        (143, f"step 40 of 100\n{LOST}", {"sent": {signal.SIGTERM}, "killed": {("rank-1", 4711)}}, True),
        (143, f"step 40 of 100\n{LOST}", {"sent": {signal.SIGTERM}}, False),  # nobody was killed, and nothing cut
        (-15, "", {"sent": {signal.SIGTERM}}, True),  # before it had a handler
        (2, "error: disk full while saving step 40", {"disk_was_full": True}, True),
        (2, "error: disk full while saving step 40", {}, False),
        (2, "error: server 3 does not answer", {"disk_was_full": True}, False),
        (1, "", {}, False),
        (75, "", {}, False),
    ],
)
def test_an_end_that_no_fault_explains_is_noticed(
    tmp_path: Path, code: int, printed: str, fields: dict[str, object], is_right: bool
) -> None:
    findings = check_end(part(tmp_path, code, printed, **fields))
    assert {finding.category for finding in findings} == (set() if is_right else {"wrong end"})


def test_files_and_sockets_that_are_left_are_noticed(tmp_path: Path) -> None:
    out, temporary = tmp_path / "run", tmp_path / "t"
    (out / "checkpoints" / "step-000000100").mkdir(parents=True)
    temporary.mkdir()
    assert check_files(out, temporary) == []
    (out / "checkpoints" / ".tmp-step-000000200").mkdir()
    (out / ".spec.yaml.tmp-123").touch()
    (temporary / "rowstead-x").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(temporary / "rowstead-x" / "sparse-0-0"))
    assert len(check_files(out, temporary)) == 4  # the checkpoint twice: as a temporary file, and among the checkpoints


@pytest.fixture
def small_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the size that tests have."""
    monkeypatch.setattr(fault_oracle, "BATCH_SIZE", 64)
    monkeypatch.setattr(fault_oracle, "NUM_STEPS", dict.fromkeys(MODES, 100))


def result_of(out: Path, tmp_path: Path, mode: Mode, *, fleet: str = "", **fields: object) -> Result:
    temporary = tmp_path / "t"
    temporary.mkdir(exist_ok=True)
    schedule = Schedule(seed=1, mode=mode, training="", fleet=fleet, faults=())
    return Result(schedule, out, temporary, [part(tmp_path, 0, "")], [], {}, **fields)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_modes")
def test_another_model_than_undisturbed_too_few_steps_a_process_and_a_hang_are_noticed(tmp_path: Path) -> None:
    out = train(small_spec(), out=tmp_path / "one").folder
    reference = read_reference(out)
    assert check(result_of(out, tmp_path, "single"), reference) == []
    other = train(small_spec("seed=2"), out=tmp_path / "other").folder
    assert {f.category for f in check(result_of(other, tmp_path, "single"), reference)} == {"wrong weights"}
    short = train(small_spec("train.max_steps=90"), out=tmp_path / "short").folder
    assert {f.category for f in check(result_of(short, tmp_path, "single"), reference)} == {"wrong weights", "unexplained loss"}
    left = result_of(out, tmp_path, "single", remaining=["4711 python -m rowstead"])
    assert [f.category for f in check(left, reference)] == ["leftover"]
    assert [f.category for f in check(result_of(out, tmp_path, "single", hang="at step 3"), reference)] == ["hang"]


@pytest.mark.usefixtures("small_modes")
def test_a_loss_that_a_fleets_record_does_not_count_is_noticed(tmp_path: Path) -> None:
    out = tmp_path / "fleet"
    (out / "roles").mkdir(parents=True)
    figures = {"num_steps": 100, "num_samples": 6400, "num_lost_updates": 4, "num_batches_repeated": 0, "num_restarts": 1}

    def findings(*updates: int, said: str = "", **changed: float) -> list[str]:
        (out / "record.json").write_text(json.dumps({"figures": {**figures, "ne_expected": 0.88, **changed}}))
        for number, count in enumerate(updates):
            torn = '{"num_updates": 9'  # by a kill
            (out / "roles" / f"sparse-{number}.jsonl").write_text(f'{{"num_updates": 7}}\n{{"num_updates": {count}}}\n{torn}')
        result = result_of(out, tmp_path, "fleet", fleet="trainers=1,sparse=2,dense=0,readers=1")
        result.parts[0].killed.add(("sparse-1", 4711))
        result.parts[0].log.write_text(said)
        return [finding.category for finding in check(result, Reference(weights={}, ne=0.88))]

    assert findings(100, 96) == []
    assert findings(100, 95) == ["unexplained loss"]
    assert findings(100, 96, num_lost_updates=3) == ["unexplained loss"]
    assert findings(100, 96, num_steps=99) == ["unexplained loss"]
    assert findings(100, 96, ne_expected=0.9) == ["unexplained loss"]
    assert findings(100, 96, num_restarts=2) == ["wrong end"], "somebody was restarted who was not killed"
    lost_dense = {"num_lost_dense_steps": 11, "said": describe_lost_dense_steps(11)}
    assert findings(100, 96, ne_expected=1.5, **lost_dense) == []
    assert findings(100, 96, num_lost_dense_steps=11) == ["unexplained loss"], "nothing is said of them"
    assert findings(100, 96, ne_expected=1.5, **lost_dense | {"num_lost_dense_steps": 9}) == ["unexplained loss"]


# Links


class EchoServer:
    """Sends back what it gets, over the Unix socket `path`."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            while content := connection.recv(1 << 16):
                connection.sendall(content)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("s") / "rowstead-x"
    folder.mkdir()
    echo = EchoServer(folder / "sparse-0-0")
    yield folder
    echo.close()


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def exchange(connection: socket.socket, content: bytes) -> float:
    """Send and receive; return the seconds that it took."""
    since_s, received = time.monotonic(), b""
    connection.sendall(content)
    while len(received) < len(content):
        more = connection.recv(1 << 16)
        if not more:
            raise ConnectionResetError
        received += more
    assert received == content
    return time.monotonic() - since_s


def test_a_link_passes_bytes_and_can_be_slow_or_cut(sockets: Path) -> None:
    path = sockets / "sparse-0-0"
    with Links(sockets.parent) as links:
        wait_until(lambda: path.with_name("sparse-0-0~").exists() and path.exists(), what="the relay")
        with connect(path) as connection:
            exchange(connection, bytes(range(256)) * 1000)
            wait_until(lambda: links.num_bytes == 2 * 256_000, what="the relay's count")
            links.slow_down("sparse-0", 60.0)
            assert exchange(connection, b"x") > 0.05
            links.cut("sparse-0", 0.3)
            with pytest.raises(OSError):
                wait_until(lambda: exchange(connection, b"x") < 0, what="the cut")

        def is_back() -> bool:
            with connect(path) as again:
                try:
                    return exchange(again, b"x") > 0
                except OSError:
                    return False

        wait_until(is_back, what="the link")


# A disturbed run


@pytest.mark.slow
def test_a_run_that_is_killed_stopped_and_frozen_and_whose_disk_fills_up_is_what_it_would_have_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fault_recipe.NUM_STEPS, "single", 400)
    undisturbed = Schedule(seed=0, mode="single", training="", fleet="", faults=())
    with disturbed(undisturbed) as result:
        reference = read_reference(result.out)
        assert check(result, reference) == []
    faults = (
        Fault(kind="freeze", victims=(MAIN,), at=0.1, delay_s=0.0, duration_s=0.5),
        Fault(kind="kill", victims=(MAIN,), at=0.3, delay_s=0.0),
        Fault(kind="stop", victims=(MAIN,), at=0.5, delay_s=0.0, signal="SIGTERM"),
        Fault(kind="full disk", victims=(DISK,), at=0.6, delay_s=0.0, duration_s=1.0),
    )
    with disturbed(Schedule(seed=0, mode="single", training="", fleet="", faults=faults)) as result:
        assert check(result, reference) == []
        assert result.injected == list(faults)
        assert [part.code for part in result.parts][:1] == [-signal.SIGKILL]
        assert result.parts[-1].code == 0
        assert len(result.parts) >= 3
