"""Usage figures follow what the process does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rowstead.records.usage import (
    UsageSampler,
    cpu_model,
    machine_facts,
    peak_memory_bytes,
    perf_traffic_bytes,
    usable_cores,
    versions,
)


def busy(seconds: float) -> None:
    """Use one core for so long."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def test_figures_show_cpu_and_memory_in_use() -> None:
    with UsageSampler(interval_s=0.05) as sampler:
        block = np.ones(25_000_000)
        busy(0.4)
        while sampler.figures()["rss_max_bytes"] < block.nbytes:
            busy(0.05)
    figures = sampler.figures()
    assert figures["cpu_s"] >= 0.3
    assert 0 < figures["cpu_share_mean"] <= figures["cpu_share_max"] * 1.001
    assert figures["cpu_share_mean"] <= 1.2
    assert 0 < figures["rss_mean_bytes"] <= figures["rss_max_bytes"] <= figures["peak_memory_bytes"]


def test_the_thread_ends_with_the_sampler() -> None:
    before = threading.active_count()
    with UsageSampler(interval_s=60) as sampler:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert sampler.figures()["rss_max_bytes"] > 0


def test_a_stretch_too_short_to_measure_has_no_cpu_figure() -> None:
    with UsageSampler(interval_s=60) as sampler:
        assert "cpu_share_mean" not in sampler.figures()


@pytest.mark.skipif(peak_memory_bytes() is None, reason="the peak is known on Linux only")
def test_the_peak_is_of_this_process_and_not_of_its_parent() -> None:
    block = np.ones(40_000_000)
    code = "from rowstead.records.usage import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < block.nbytes < (peak_memory_bytes() or 0)


def test_machine_facts_are_plain_and_name_a_gpu_only_when_told() -> None:
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["num_cores"] >= facts["num_usable_cores"] == usable_cores() >= 1  # type: ignore[operator]
    assert facts["memory_bytes"] > 1e8  # type: ignore[operator]
    assert "gpu" not in facts
    assert machine_facts(gpu="some GPU")["gpu"] == "some GPU"
    assert all(isinstance(value, (str, int, float)) for value in facts.values())


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["model\t: 1", "model name\t: AMD EPYC", "cpu family\t: 25"], "AMD EPYC (family 25, model 1)"),
        (["cpu family: 6", "model : 85", "model name: Xeon CPU @ 2.80GHz"], "Xeon CPU @ 2.80GHz (family 6, model 85)"),
        (["cpu family: 6", "model : 85", "model name: Xeon Gold 6130 @ 2.10GHz"], "Xeon Gold 6130 @ 2.10GHz"),
        (["model name: A Processor"], "A Processor"),
    ],
)
def test_processors_that_share_a_name_are_told_apart(lines: list[str], name: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("\n".join([*lines, "", "model name: that of another core"]))
    assert cpu_model(info) == name


def test_versions_are_known_without_importing_torch() -> None:
    code = "import sys; from rowstead.records.usage import versions; print(versions()['torch'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [versions()["torch"], "False"]
    assert "rowstead" in versions()


def test_cache_misses_are_counted_where_the_system_allows_it() -> None:
    before = perf_traffic_bytes()
    if before is None:
        pytest.skip("this system does not count cache misses")
    np.ones(40_000_000).sum()
    assert perf_traffic_bytes() > before
