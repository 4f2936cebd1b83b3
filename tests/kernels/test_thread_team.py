"""Work that threads share: those of torch on the main thread, a pool's elsewhere and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
import torch

from rowstead.kernels.cpu import thread_team


def on_another_thread(work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("run", [lambda work: work(), on_another_thread], ids=["main", "another"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_one_takes_no_other_takes(threads: int, run: Callable[[Callable[[], None]], None]) -> None:
    left, done = list(range(1000)), [0] * 1000

    def work() -> int:
        count = 0
        while left:
            try:
                done[left.pop()] += 1
            except IndexError:
                break
            count += 1
        return count

    def check() -> None:
        assert sum(thread_team.run_on_threads(work, threads)) == 1000

    run(check)
    assert done == [1] * 1000


@pytest.mark.skipif(thread_team._openmp() is None, reason="needs GNU OpenMP")
def test_on_the_main_thread_they_are_those_of_torch() -> None:
    meeting, names = threading.Barrier(2, timeout=30), []

    def work() -> None:
        meeting.wait()  # so two threads are in it at once
        names.append(threading.current_thread().name)

    torch.rand(1_000_000).add_(1)
    thread_team.run_on_threads(work, 2)
    assert len(names) == 2
    assert not any(name.startswith("kernel") for name in names)


@pytest.mark.parametrize("run", [lambda work: work(), on_another_thread], ids=["main", "another"])
def test_a_failure_on_any_thread_is_raised(run: Callable[[Callable[[], None]], None]) -> None:
    meeting, here = threading.Barrier(2, timeout=30), threading.Event()

    def work() -> None:
        if meeting.wait() == 0:
            here.set()
            raise ValueError("one of two")
        here.wait(30)

    def check() -> None:
        with pytest.raises(ValueError, match="one of two"):
            thread_team.run_on_threads(work, 2)

    run(check)


@pytest.mark.skipif(thread_team._openmp() is None, reason="needs GNU OpenMP")
def test_no_more_threads_enter_than_are_wanted_and_none_is_ended_for_that() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.rand(1_000_000).add_(1)
        tasks = set(os.listdir("/proc/self/task"))
        for _ in range(20):
            assert 1 <= len(thread_team.run_on_threads(lambda: 1, 2)) <= 2
        assert set(os.listdir("/proc/self/task")) == tasks
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_an_interrupt_is_raised_whenever_it_comes(delay_s: float) -> None:
    """Also right before the main thread's part, where OpenMP would lose it: 30 tries with an interrupt some time within each."""
    script = f"""
        import os, signal, threading, time, torch
        from rowstead.kernels.cpu import thread_team
        torch.set_num_threads(2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def work():
            end = time.perf_counter() + {delay_s}
            while time.perf_counter() < end:
                pass
            return 1
        caught = 0
        for number in range(30):
            sender = threading.Timer(0.0003 * number, os.kill, (os.getpid(), signal.SIGINT))
            try:
                sender.start()
                end = time.perf_counter() + 5
                while time.perf_counter() < end:
                    assert thread_team.run_on_threads(work, 2)
            except KeyboardInterrupt:
                caught += 1
            sender.join()
        print(caught)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=240, capture_output=True, text=True
    )
    assert (child.stdout.strip(), child.stderr.count("Traceback")) == ("30", child.stderr.count("Exception ignored")), (
        child.stderr
    )


def test_work_may_share_its_own_work() -> None:
    def inner() -> int:
        return 1

    results = thread_team.run_on_threads(lambda: sum(thread_team.run_on_threads(inner, 2)), 2)
    assert results
    assert all(count >= 1 for count in results)


def test_parts_are_all_done_once() -> None:
    seen: list[tuple[int, int]] = []
    thread_team.parallel_ranges(lambda a, b: seen.append((a, b)), [0, 3, 3, 7, 10])
    assert sorted(seen) == [(0, 3), (3, 7), (7, 10)]
    seen.clear()
    thread_team.parallel_for(lambda a, b: seen.append((a, b)), 10, num_bytes=100 << 20)
    assert sorted(index for a, b in seen for index in range(a, b)) == list(range(10))


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not() -> None:
    script = """
        import os, signal, torch
        from rowstead.kernels.cpu import thread_team
        torch.set_num_threads(2)
        torch.rand(1_000_000).add_(1)
        assert sum(thread_team.run_on_threads(lambda: 1, 2)) >= 1
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if sum(thread_team.run_on_threads(lambda: 1, 2)) >= 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120, check=False).returncode == 0
