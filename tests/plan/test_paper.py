"""What the HPCA 2021 study found, statement by statement, as our equations predict it. docs/paper_prediction.md has the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fit_paper import CONSTANTS
from benchmarks.paper import (
    FIG10,
    FITS,
    FLEETS,
    NUM_CPU_SERVERS,
    SET_BY_HAND,
    SPARSE,
    TABLE3,
    cell,
    error,
    fig1,
    left_out_errors,
    machines,
    on_big_basin,
    on_cpu,
    placed,
    placements,
    production,
    suite_model,
    suite_work,
    work_of,
)
from benchmarks.paper_page import PAGE, page
from rowstead.plan.predict import predict
from rowstead.plan.setup import Setup, fewest_devices, held, shortfalls
from rowstead.plan.setups import fewest_servers
from rowstead.plan.work import step_work
from rowstead.spec.catalogue import load_software
from rowstead.spec.stores import PlannedStore

SOFTWARE = load_software("operators-2020")
DENSE = tuple(FIG10)


@pytest.fixture(scope="module")
def cells() -> dict[tuple[int, int], dict[str, float]]:
    return {(dense, sparse): cell(dense, sparse, SOFTWARE) for dense in DENSE for sparse in SPARSE}


Cells = dict[tuple[int, int], dict[str, float]]


def test_the_sweep_is_near_the_paper(cells: Cells) -> None:
    ratios = [found["gpu_over_cpu_throughput"] / FIG10[dense][sparse] for (dense, sparse), found in cells.items()]
    assert error(ratios) <= 0.25
    assert max(error([ratio]) for ratio in ratios) <= 0.60


def test_rows_and_columns_that_a_fit_did_not_see_are_not_far_off() -> None:
    found = left_out_errors(SOFTWARE)
    for kind in ("row", "column"):
        assert found[f"leave_one_{kind}_out_error_geomean_pct"] <= 25
        assert found[f"leave_one_{kind}_out_error_max_pct"] <= 60


def test_few_constants_are_made_to_fit() -> None:
    """Four at most: those that the script fits, and those that are set by hand; the software's source names them all."""
    assert len(CONSTANTS) + len(SET_BY_HAND) <= 4
    assert set(CONSTANTS) == set(json.loads(FITS.read_text())["all"])
    assert all(f"`{name}`" in SOFTWARE.source for name in (*CONSTANTS, *SET_BY_HAND))


def test_the_software_has_the_constants_that_the_fit_found() -> None:
    for name, value in json.loads(FITS.read_text())["all"].items():
        assert getattr(SOFTWARE, name) == pytest.approx(value)


def test_the_efficiency_matrix_follows_from_throughput_and_nameplate_power(cells: Cells) -> None:
    for found in cells.values():
        assert found["gpu_over_cpu_efficiency"] == pytest.approx(
            found["gpu_over_cpu_throughput"] * NUM_CPU_SERVERS / 7.3, rel=0.01
        )


def test_gpu_throughput_is_higher_in_every_cell(cells: Cells) -> None:
    assert all(found["gpu_over_cpu_throughput"] > 1 for found in cells.values())


def test_efficiency_is_below_one_only_with_64_dense_and_few_sparse_features(cells: Cells) -> None:
    assert {place for place, found in cells.items() if found["gpu_over_cpu_efficiency"] < 1} == {(64, 4), (64, 16)}


def test_efficiency_is_best_with_many_dense_features(cells: Cells) -> None:
    best = max(cells, key=lambda place: cells[place]["gpu_over_cpu_efficiency"])
    assert best[0] == max(DENSE)


@pytest.mark.parametrize("figure", ["cpu_samples_per_s", "gpu_samples_per_s"])
def test_throughput_falls_as_features_are_added(cells: Cells, figure: str) -> None:
    for sparse in SPARSE:
        column = [cells[dense, sparse][figure] for dense in DENSE]
        assert column == sorted(column, reverse=True)
    for dense in DENSE:
        row = [cells[dense, sparse][figure] for sparse in SPARSE]
        assert row == sorted(row, reverse=True)


def test_gpu_throughput_rises_about_linearly_with_the_batch_then_saturates() -> None:
    work = suite_work(1024, 64)
    speed = {batch: on_big_basin(work, SOFTWARE, batch_size=batch).samples_per_s for batch in (100, 200, 12800, 25600)}
    assert speed[200] / speed[100] > 1.8
    assert 1.0 < speed[25600] / speed[12800] < 1.15


def test_cpu_throughput_gets_worse_with_large_batches() -> None:
    work = suite_work(64, 4)
    speed = {batch: on_cpu(work, SOFTWARE, batch_size=batch).samples_per_s for batch in (100, 400, 1600, 25600)}
    assert speed[100] < speed[400] < speed[1600]
    assert speed[25600] < 0.9 * speed[1600]


def test_the_best_batch_differs_between_cpu_and_gpu_and_with_the_model() -> None:
    batches = [100 * 2**k for k in range(9)]

    def best(run: object, num_dense: int, num_sparse: int) -> int:
        work = suite_work(num_dense, num_sparse)
        return max(batches, key=lambda batch: run(work, SOFTWARE, batch_size=batch).samples_per_s)  # type: ignore[operator]

    assert best(on_cpu, 64, 4) < best(on_big_basin, 64, 4)
    assert best(on_cpu, 64, 4) != best(on_cpu, 4096, 16)


HASH_SIZES = (100_000, 1_000_000, 3_000_000, 5_000_000)


def test_cpu_throughput_is_flat_in_the_hash_size() -> None:
    speeds = [on_cpu(step_work(suite_model(1024, 64, num_rows=rows)), SOFTWARE).samples_per_s for rows in HASH_SIZES]
    assert max(speeds) / min(speeds) < 1.05


def test_gpu_throughput_drops_as_tables_spread_over_more_gpus() -> None:
    found = [on_big_basin(step_work(suite_model(1024, 64, num_rows=rows)), SOFTWARE) for rows in HASH_SIZES]
    assert [one.setup.num_devices for one in found] == [1, 2, 4, 8]
    speeds = [one.samples_per_s for one in found]
    assert speeds == sorted(speeds, reverse=True)


def test_mlps_up_to_256_cost_little_and_beyond_cpus_lose_more() -> None:
    def speeds(*mlp: int) -> tuple[float, float]:
        work = step_work(suite_model(1024, 16, mlp=mlp))
        return on_cpu(work, SOFTWARE).samples_per_s, on_big_basin(work, SOFTWARE).samples_per_s

    (cpu_least, gpu_least), (cpu_256, gpu_256), (cpu_2048, gpu_2048) = speeds(64, 64), speeds(*[256] * 3), speeds(*[2048] * 3)
    assert cpu_256 > 0.85 * cpu_least
    assert gpu_256 > 0.85 * gpu_least
    assert cpu_2048 / cpu_256 < gpu_2048 / gpu_256 < 0.85


@pytest.mark.parametrize("name", list(TABLE3))
def test_production_models_are_within_35_percent_and_on_the_right_side_of_one(name: str) -> None:
    cpu, gpu = production(name, SOFTWARE)
    ratio = gpu.samples_per_s / cpu.samples_per_s
    assert 0.65 <= ratio / TABLE3[name] <= 1.35
    assert (ratio > 1) == (TABLE3[name] > 1)


def test_m1_and_m2_fit_big_basins_gpus_and_m3_does_not() -> None:
    _, big_basin, _ = machines()
    fits = {
        name: not shortfalls(work_of(name), big_basin, Setup(placement="device", batch_size=fleets.batch_size, num_devices=8))
        for name, fleets in FLEETS.items()
    }
    assert fits == {"m1": True, "m2": True, "m3": False}
    assert held(work_of("m3"), big_basin, Setup(placement="host", batch_size=800, num_devices=8)).host_bytes > 256e9


@pytest.mark.parametrize(
    ("name", "machine", "best"),
    [
        ("m1", 1, "device"),
        ("m2", 1, "device"),
        ("m2", 2, "host"),
        ("m1", 2, "host"),
    ],
)
def test_best_placement_of_a_model(name: str, machine: int, best: str) -> None:
    """GPU memory on Big Basin, system memory on the Zion prototype."""
    server, batch_size = machines()[machine], FLEETS[name].batch_size
    speed = {
        place: placed(work_of(name), server, place, batch_size, SOFTWARE).samples_per_s
        for place in ("device", "host", "remote")
    }
    assert max(speed, key=speed.__getitem__) == best


def test_m3_is_best_on_remote_servers_on_big_basin_and_in_system_memory_on_zion() -> None:
    """On Big Basin nothing else fits; on Zion system memory is faster than as few remote servers as hold the tables.

    With the 18 remote servers of the study's Big Basin, 19 servers in all, remote memory is ahead in ours: the page says so.
    """
    cpu, big_basin, zion = machines()
    work = work_of("m3")
    near: tuple[PlannedStore, ...] = ("device", "host")
    assert all(placed(work, big_basin, place, 800, SOFTWARE).shortfalls for place in near)
    host, remote = (
        placed(work, zion, "host", 800, SOFTWARE),
        placed(work, zion, "remote", 800, SOFTWARE, fewest_servers(work, cpu)),
    )
    assert host.fits
    assert host.samples_per_s > remote.samples_per_s


def test_m3_on_zion_is_more_efficient_than_several_big_basins_that_hold_it_in_gpu_memory() -> None:
    """A server each; the study's own model has orders of magnitude, which the published bandwidths do not give: the page says so."""
    _, big_basin, zion = machines()
    work = work_of("m3")
    several = predict(work, big_basin, SOFTWARE, Setup(placement="device", batch_size=800, num_devices=8, num_trainers=3))
    assert several.fits
    assert placed(work, zion, "host", 800, SOFTWARE).samples_per_s > several.samples_per_s / 3


def test_m2_in_gpu_memory_is_best_on_big_basin_and_not_far_lower_on_zion() -> None:
    """The study has Zion far lower, as its GPUs have no direct path. Ours has it lower by less than 5 %: a miss, which the page lists."""
    found = placements(SOFTWARE)
    assert found["bigbasin-32"]["device"] == max(found["bigbasin-32"].values())
    assert 0.95 < found["zion-prototype"]["device"] / found["bigbasin-32"]["device"] < 1


def test_fig1_throughput_rises_from_cpu_servers_to_big_basin_to_zion() -> None:
    for speeds in fig1(SOFTWARE).values():
        assert list(speeds) == ["cpu-2s", "bigbasin-32", "zion-prototype"]
        assert list(speeds.values()) == sorted(speeds.values())


def test_fig1_m3_gains_least_from_cpu_servers_to_either_platform() -> None:
    """From Big Basin to Zion ours has it gain most, 1.3-fold against 1.2: Big Basin has it on remote servers."""
    for platform in ("bigbasin-32", "zion-prototype"):
        gains = {name: speeds[platform] / speeds["cpu-2s"] for name, speeds in fig1(SOFTWARE).items()}
        assert min(gains, key=gains.__getitem__) == "m3"


def test_m2_in_system_memory_is_best_on_zion_and_far_below_gpu_memory_on_big_basin() -> None:
    """The paper says 4 times below on Big Basin; ours is between 2 and 6."""
    found = placements(SOFTWARE)
    assert found["zion-prototype"]["host"] > 1.5 * found["bigbasin-32"]["host"]
    assert 2 < found["bigbasin-32"]["device"] / found["bigbasin-32"]["host"] < 6


def test_m2_in_remote_memory_beats_neither_on_either_platform_and_zion_is_ahead() -> None:
    found = placements(SOFTWARE)
    for of_place in found.values():
        assert of_place["remote"] < min(of_place["device"], of_place["host"])
    assert found["zion-prototype"]["remote"] > found["bigbasin-32"]["remote"]


def test_remote_placement_is_held_up_by_the_gpu_servers_cores_and_copies() -> None:
    _, gpu = production("m3", SOFTWARE)
    assert gpu.bottlenecks[0].resource == "host cores"


def test_throughput_grows_linearly_with_trainers_up_to_a_point() -> None:
    work = suite_work(1024, 64)
    speed = {n: on_cpu(work, SOFTWARE, num_trainers=n, num_sparse=4).samples_per_s for n in (1, 2, 4, 16, 32)}
    assert speed[2] / speed[1] == pytest.approx(2, rel=0.05)
    assert speed[4] / speed[1] == pytest.approx(4, rel=0.05)
    assert speed[32] / speed[16] < 1.1


def test_small_tables_run_on_one_gpu() -> None:
    assert fewest_devices(suite_work(1024, 128), machines()[1], 1600) == 1


def test_any_cells_can_be_asked_for() -> None:
    command = [sys.executable, "-m", "benchmarks.paper", "--dense", "300", "--sparse", "7,9", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    rows = [row for row in json.loads(done.stdout.splitlines()[-1])["rows"] if "dense" in row]
    assert [(row["dense"], row["sparse"]) for row in rows] == [(300, 7), (300, 9)]
    assert all(row["gpu_over_cpu_throughput"] > 1 for row in rows)


def test_the_page_is_what_the_equations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(SOFTWARE), "run `python -m benchmarks.paper_page`"
