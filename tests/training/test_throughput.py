"""Throughput of a run, whether it waited for data, and the warning about it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.synth import write_parquet
from rowstead.run import train
from rowstead.training.throughput import WARM_STEPS, ReaderReport, Throughput, reader_report, reader_warning
from tests.small_runs import parquet_spec, small_spec

STALLED = ReaderReport(stalled_share=0.62, max_samples_per_s=1e6, cores_used=14.2, cores_needed=37.4, thread_share=0.3)


def warning(*, spent_s: float = 60.0, num_cores: int = 16, on_gpu: bool = True, **changes: float) -> str | None:
    return reader_warning(dataclasses.replace(STALLED, **changes), spent_s=spent_s, num_cores=num_cores, on_gpu=on_gpu)


def test_the_first_steps_do_not_count_once_there_are_as_many_others() -> None:
    throughput, waited_s = Throughput(), 0.0
    assert throughput.samples_per_s is None
    for step in range(2 * WARM_STEPS):
        is_first = step < WARM_STEPS
        waited_s += 0.5 if is_first else 0.05
        throughput.add(100, 2.0 if is_first else 0.2, waited_s=waited_s)
        if step == 0:
            assert throughput.samples_per_s == pytest.approx(50)
    assert throughput.samples_per_s == pytest.approx(500)
    assert throughput.waiting_share == pytest.approx(0.25)
    assert throughput.spent_s == pytest.approx(0.2 * WARM_STEPS)


def test_a_trainer_on_the_cpu_could_do_what_it_does_while_it_does_not_wait() -> None:
    report = reader_report(samples_per_s=8_000, waiting_share=0.2, core_s_per_sample=50e-6, thread_s_per_sample=20e-6)
    assert report.max_samples_per_s == pytest.approx(10_000)
    assert report.stalled_share == pytest.approx(0.2)
    assert report.cores_used == pytest.approx(0.4)
    assert report.cores_needed == pytest.approx(0.5)
    assert report.thread_share == pytest.approx(0.16)


def test_a_gpu_could_do_what_it_does_while_it_is_busy() -> None:
    report = reader_report(
        samples_per_s=400_000, waiting_share=0.9, core_s_per_sample=17e-6, thread_s_per_sample=2e-6, gpu_s_per_sample=0.5e-6
    )
    assert report.max_samples_per_s == pytest.approx(2_000_000)
    assert report.stalled_share == pytest.approx(0.8)
    assert report.cores_used == pytest.approx(6.8)
    assert report.cores_needed == pytest.approx(34)


def test_waiting_while_a_gpu_is_busy_is_no_stall() -> None:
    report = reader_report(
        samples_per_s=1_000, waiting_share=0.9, core_s_per_sample=1e-3, thread_s_per_sample=1e-4, gpu_s_per_sample=1e-3
    )
    assert report.stalled_share == 0.0
    assert report.cores_needed == report.cores_used


@given(
    st.floats(1, 1e7), st.floats(0, 1), st.floats(0, 1e-2), st.floats(0, 1e-2), st.none() | st.floats(0, 1e-2, exclude_min=True)
)
def test_whatever_was_measured_shares_are_shares_and_more_cores_are_needed_than_used(
    samples_per_s: float, waiting_share: float, core_s: float, thread_s: float, gpu_s: float | None
) -> None:
    report = reader_report(
        samples_per_s=samples_per_s,
        waiting_share=waiting_share,
        core_s_per_sample=core_s,
        thread_s_per_sample=thread_s,
        gpu_s_per_sample=gpu_s,
    )
    assert 0 <= report.stalled_share <= 1
    assert report.cores_needed >= report.cores_used >= 0
    assert report.max_samples_per_s >= samples_per_s


def test_the_warning_says_how_many_cores_would_read_fast_enough() -> None:
    assert warning() == (
        "Training waited for data 62% of the time; reading used 15 cores, and 38 would keep this GPU busy (there are 16 here). "
        "Fewer features or a lower `max_ids` also help."
    )


def test_more_cores_are_not_advised_where_reading_did_not_use_those_it_had() -> None:
    for num_cores in (16, 64):
        line = str(warning(num_cores=num_cores, cores_used=1.1, cores_needed=92))
        assert f"62% of the time, but reading used only 1.1 of {num_cores} cores, so more cores would not help" in line
    assert "but one thread assembles the batches" in str(warning(num_cores=64, thread_share=0.97))
    assert "but one thread assembles the batches" in str(warning(num_cores=16, thread_share=0.97))


def test_a_gpu_that_was_idle_though_data_was_there_is_reported() -> None:
    report = reader_report(
        samples_per_s=25_000, waiting_share=0.23, core_s_per_sample=45e-6, thread_s_per_sample=2e-6, gpu_s_per_sample=0.5e-6
    )
    assert report.idle_share == pytest.approx(1 - 0.0125 - 0.23)
    line = reader_warning(report, spent_s=60.0, num_cores=16, on_gpu=True)
    assert str(line).endswith("For another 76% the GPU was idle between steps: larger batches keep it busier.")
    assert "For another" not in str(warning())


def test_on_a_cpu_the_cores_that_train_come_on_top() -> None:
    line = warning(on_gpu=False, num_cores=2, cores_used=0.8, cores_needed=1.1)
    assert "about 1.1 more cores would fix it (training uses the 2 here too)" in str(line)


def test_short_waits_are_not_reported() -> None:
    assert warning(stalled_share=0.09) is None
    assert warning(spent_s=0.5) is None, "less than half a second was lost"


@pytest.mark.parametrize("kind", ["synth", "parquet"])
def test_a_record_has_the_cost_of_reading(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec, folder = small_spec("train.max_steps=40"), tmp_path_factory.mktemp("run")
    if kind == "parquet":
        assert spec.data.synth is not None
        write_parquet(spec.data.synth, folder / "log", rows_per_group=400)
        spec = parquet_spec(folder / "log", "train.max_steps=40")
    result = train(spec, out=folder / "run")
    assert result.record is not None
    figures = result.record.figures
    assert 0 <= figures["reading_held_up_share"] <= 1
    assert 0 < figures["reader_cores_used"] <= figures["reader_cores_needed"]
    assert figures["alone_samples_per_s"] >= figures["samples_per_s"] > 0
