"""Requests run once and are answered for certain, whatever is lost, repeated or delayed on the way."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.fleet.deduplication import WINDOW, RequestDeduplicator, RequestVerdict
from rowstead.fleet.wire import REQUEST, Header, Limits


def header(number: int, *, sender: int = 1, answered_below: int = 0) -> Header:
    return Header(REQUEST, number, sender, answered_below, "kind", "me")


def test_a_request_that_comes_again_waits_or_gets_the_same_answer() -> None:
    ledger = RequestDeduplicator(Limits())
    assert ledger.admit(header(0), b"first") == (RequestVerdict.RUN, None)
    assert ledger.admit(header(0), b"second") == (RequestVerdict.WAIT, None)
    assert ledger.finish(1, 0, [b"answer"]) == b"second"
    assert ledger.admit(header(0), b"third") == (RequestVerdict.REPEAT, [b"answer"])


def test_answers_that_a_client_has_are_dropped_and_not_asked_for_again() -> None:
    ledger = RequestDeduplicator(Limits())
    for number in range(3):
        ledger.admit(header(number), b"r")
        ledger.finish(1, number, [b"0123456789"])
    assert ledger.remembered_bytes == 30
    ledger.admit(header(3, answered_below=2), b"r")
    assert ledger.remembered_bytes == 10
    assert ledger.admit(header(1), b"r") == (RequestVerdict.STALE, None)
    assert ledger.admit(header(2), b"r") == (RequestVerdict.REPEAT, [b"0123456789"])


def test_answers_past_the_bound_lose_their_content_oldest_first_but_do_not_run_again() -> None:
    ledger = RequestDeduplicator(Limits(remembered_bytes=25))
    for number in range(3):
        ledger.admit(header(number), b"r")
        ledger.finish(1, number, [b"0123456789"])
    assert ledger.remembered_bytes == 20
    assert ledger.admit(header(0), b"r") == (RequestVerdict.EVICTED, None)
    assert ledger.admit(header(1), b"r")[0] is RequestVerdict.REPEAT


def test_the_last_answer_is_kept_however_large() -> None:
    ledger = RequestDeduplicator(Limits(remembered_bytes=5))
    ledger.admit(header(0), b"r")
    ledger.finish(1, 0, [b"0123456789"])
    assert ledger.admit(header(0), b"r")[0] is RequestVerdict.REPEAT


def test_a_client_may_have_so_many_requests_in_flight_and_no_more() -> None:
    ledger = RequestDeduplicator(Limits(in_flight_per_client=2))
    assert [ledger.admit(header(number), b"r")[0] for number in range(3)] == [
        RequestVerdict.RUN,
        RequestVerdict.RUN,
        RequestVerdict.TOO_MANY,
    ]
    assert ledger.admit(header(0, sender=2), b"r")[0] is RequestVerdict.RUN
    ledger.finish(1, 0, [])
    assert ledger.admit(header(2), b"r")[0] is RequestVerdict.RUN


def test_clients_past_the_bound_push_out_the_one_not_heard_of_for_longest_unless_its_request_runs() -> None:
    ledger = RequestDeduplicator(Limits(num_clients=2))
    ledger.admit(header(0, sender=1), b"r")
    ledger.admit(header(0, sender=2), b"r")
    assert ledger.admit(header(0, sender=3), b"r")[0] is RequestVerdict.TOO_MANY
    ledger.finish(2, 0, [b"answer"])
    assert ledger.admit(header(0, sender=3), b"r")[0] is RequestVerdict.RUN
    assert (ledger.num_clients, ledger.remembered_bytes) == (2, 0)


def test_a_client_that_never_says_what_it_has_does_not_fill_the_ledger() -> None:
    ledger = RequestDeduplicator(Limits(remembered_bytes=1000))
    for number in range(3 * WINDOW):
        assert ledger.admit(header(number), b"r")[0] is RequestVerdict.RUN
        ledger.finish(1, number, [b"0123456789"])
    assert ledger.remembered_bytes <= 1000
    assert len(ledger._clients[1].requests) <= WINDOW + 1


STEPS = ["serve", "answer", "lose request", "lose answer", "send again"]


@settings(max_examples=200)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=60), num_requests=st.integers(1, 20), max_in_flight=st.integers(1, 4))
def test_each_request_runs_once_and_is_answered_on_a_network_that_loses_and_repeats(
    steps: list[str], num_requests: int, max_in_flight: int
) -> None:
    ledger = RequestDeduplicator(Limits())
    runs: list[int] = []
    to_server: deque[Header] = deque()
    to_client: deque[tuple[int, bytes]] = deque()
    unanswered: dict[int, None] = {}
    answers: dict[int, bytes] = {}
    started = 0
    for step in [
        *steps,
        *["send again", "serve", "answer"] * num_requests,
    ]:  # at the end nothing is lost any more, and all must end
        if started < num_requests and len(unanswered) < max_in_flight:
            unanswered[started] = None
            to_server.append(header(started, answered_below=next(iter(unanswered))))
            started += 1
        if step == "send again" and unanswered:
            to_server.extend(header(number, answered_below=next(iter(unanswered))) for number in unanswered)
        if step == "lose request" and to_server:
            to_server.popleft()
        if step == "lose answer" and to_client:
            to_client.popleft()
        while to_server and step == "serve":
            request = to_server.popleft()
            verdict, answer = ledger.admit(request, b"r")
            if verdict is RequestVerdict.RUN:
                runs.append(request.number)
                ledger.finish(1, request.number, [b"%d" % request.number])
                to_client.append((request.number, b"%d" % request.number))
            elif verdict is RequestVerdict.REPEAT:
                assert answer is not None
                to_client.append((request.number, bytes(answer[0])))
            else:
                assert verdict is RequestVerdict.STALE
        while to_client and step == "answer":
            number, content = to_client.popleft()
            if number in unanswered:
                del unanswered[number]
                answers[number] = content
    assert sorted(runs) == list(range(num_requests))
    assert answers == {number: b"%d" % number for number in range(num_requests)}
