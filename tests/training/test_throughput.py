"""How fast a run was, whether reading held it up, and what a user is told about it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.synth import write_parquet
from rowstead.run import train
from rowstead.training.throughput import WARM_STEPS, ReadingReport, Throughput, reading_line, reading_of
from tests.small_runs import parquet_spec, small_spec

HELD_UP = ReadingReport(held_up_share=0.62, alone_samples_per_s=1e6, cores_used=14.2, cores_needed=37.4, thread_share=0.3)


def told(*, spent_s: float = 60.0, num_cores: int = 16, on_gpu: bool = True, **changes: float) -> str | None:
    return reading_line(dataclasses.replace(HELD_UP, **changes), spent_s=spent_s, num_cores=num_cores, on_gpu=on_gpu)


def test_the_first_steps_do_not_count_once_there_are_as_many_others() -> None:
    pace, waited_s = Throughput(), 0.0
    assert pace.samples_per_s is None
    for step in range(2 * WARM_STEPS):
        is_first = step < WARM_STEPS
        waited_s += 0.5 if is_first else 0.05
        pace.add(100, 2.0 if is_first else 0.2, waited_s=waited_s)
        if step == 0:
            assert pace.samples_per_s == pytest.approx(50)
    assert pace.samples_per_s == pytest.approx(500)
    assert pace.waiting_share == pytest.approx(0.25)
    assert pace.spent_s == pytest.approx(0.2 * WARM_STEPS)


def test_a_trainer_on_the_cpu_could_do_what_it_does_while_it_does_not_wait() -> None:
    reading = reading_of(samples_per_s=8_000, waiting_share=0.2, core_s_per_sample=50e-6, thread_s_per_sample=20e-6)
    assert reading.alone_samples_per_s == pytest.approx(10_000)
    assert reading.held_up_share == pytest.approx(0.2)
    assert reading.cores_used == pytest.approx(0.4)
    assert reading.cores_needed == pytest.approx(0.5)
    assert reading.thread_share == pytest.approx(0.16)


def test_a_gpu_could_do_what_it_does_while_it_is_busy() -> None:
    reading = reading_of(
        samples_per_s=400_000, waiting_share=0.9, core_s_per_sample=17e-6, thread_s_per_sample=2e-6, alone_s_per_sample=0.5e-6
    )
    assert reading.alone_samples_per_s == pytest.approx(2_000_000)
    assert reading.held_up_share == pytest.approx(0.8)
    assert reading.cores_used == pytest.approx(6.8)
    assert reading.cores_needed == pytest.approx(34)


def test_waiting_while_a_gpu_is_busy_holds_nobody_up() -> None:
    reading = reading_of(
        samples_per_s=1_000, waiting_share=0.9, core_s_per_sample=1e-3, thread_s_per_sample=1e-4, alone_s_per_sample=1e-3
    )
    assert reading.held_up_share == 0.0
    assert reading.cores_needed == reading.cores_used


@given(
    st.floats(1, 1e7), st.floats(0, 1), st.floats(0, 1e-2), st.floats(0, 1e-2), st.none() | st.floats(0, 1e-2, exclude_min=True)
)
def test_whatever_was_measured_shares_are_shares_and_more_cores_are_needed_than_used(
    samples_per_s: float, waiting_share: float, core_s: float, thread_s: float, alone_s: float | None
) -> None:
    reading = reading_of(
        samples_per_s=samples_per_s,
        waiting_share=waiting_share,
        core_s_per_sample=core_s,
        thread_s_per_sample=thread_s,
        alone_s_per_sample=alone_s,
    )
    assert 0 <= reading.held_up_share <= 1
    assert reading.cores_needed >= reading.cores_used >= 0
    assert reading.alone_samples_per_s >= samples_per_s


def test_the_line_says_how_many_cores_would_read_fast_enough() -> None:
    assert told() == (
        "reading held the trainer up for 62% of the time: it used 15 cores, and about 38 would keep this GPU busy (16 are here); "
        "fewer features or a lower `max_ids` help too"
    )


def test_where_reading_did_not_use_the_cores_nobody_is_told_to_get_more() -> None:
    for num_cores in (16, 64):
        line = str(told(num_cores=num_cores, cores_used=1.1, cores_needed=92))
        assert f"62% of the time, but used only 1.1 of the {num_cores} cores, so that more alone would not help (about " in line
    assert "but one thread hands over the batches" in str(told(num_cores=64, thread_share=0.97))
    assert "but one thread hands over the batches" in str(told(num_cores=16, thread_share=0.97))


def test_a_gpu_that_waited_for_more_than_data_is_told_of() -> None:
    reading = reading_of(
        samples_per_s=25_000, waiting_share=0.23, core_s_per_sample=45e-6, thread_s_per_sample=2e-6, alone_s_per_sample=0.5e-6
    )
    assert reading.idle_share == pytest.approx(1 - 0.0125 - 0.23)
    line = reading_line(reading, spent_s=60.0, num_cores=16, on_gpu=True)
    assert str(line).endswith("For another 76% the GPU waited until steps were started: larger batches keep it busier")
    assert "For another" not in str(told())


def test_on_a_cpu_the_cores_that_train_come_on_top() -> None:
    line = told(on_gpu=False, num_cores=2, cores_used=0.8, cores_needed=1.1)
    assert "about 1.1 beside those that train would keep up (2 are here, and training uses them too)" in str(line)


def test_who_hardly_waited_is_told_nothing() -> None:
    assert told(held_up_share=0.09) is None
    assert told(spent_s=0.5) is None, "less than half a second was lost"


@pytest.mark.parametrize("kind", ["synth", "parquet"])
def test_a_record_has_what_reading_cost(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
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
