"""Each request runs once and is answered, whatever the network loses, repeats or delays."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.fleet.deduplication import WINDOW, RequestDeduplicator, RequestVerdict
from rowstead.fleet.wire import REQUEST, Header, Limits


def header(number: int, *, sender: int = 1, answered_below: int = 0) -> Header:
    return Header(REQUEST, number, sender, answered_below, "kind", "me")


def test_a_repeated_request_waits_or_gets_the_same_reply() -> None:
    deduplicator = RequestDeduplicator(Limits())
    assert deduplicator.admit(header(0), b"first") == (RequestVerdict.RUN, None)
    assert deduplicator.admit(header(0), b"second") == (RequestVerdict.WAIT, None)
    assert deduplicator.finish(1, 0, [b"reply"]) == b"second"
    assert deduplicator.admit(header(0), b"third") == (RequestVerdict.REPEAT, [b"reply"])


def test_replies_that_a_client_has_received_are_dropped() -> None:
    deduplicator = RequestDeduplicator(Limits())
    for number in range(3):
        deduplicator.admit(header(number), b"r")
        deduplicator.finish(1, number, [b"0123456789"])
    assert deduplicator.kept_replies_bytes == 30
    deduplicator.admit(header(3, answered_below=2), b"r")
    assert deduplicator.kept_replies_bytes == 10
    assert deduplicator.admit(header(1), b"r") == (RequestVerdict.STALE, None)
    assert deduplicator.admit(header(2), b"r") == (RequestVerdict.REPEAT, [b"0123456789"])


def test_over_the_limit_the_oldest_replies_are_evicted_but_their_requests_do_not_run_again() -> None:
    deduplicator = RequestDeduplicator(Limits(kept_replies_bytes=25))
    for number in range(3):
        deduplicator.admit(header(number), b"r")
        deduplicator.finish(1, number, [b"0123456789"])
    assert deduplicator.kept_replies_bytes == 20
    assert deduplicator.admit(header(0), b"r") == (RequestVerdict.EVICTED, None)
    assert deduplicator.admit(header(1), b"r")[0] is RequestVerdict.REPEAT


def test_the_last_reply_is_kept_however_large() -> None:
    deduplicator = RequestDeduplicator(Limits(kept_replies_bytes=5))
    deduplicator.admit(header(0), b"r")
    deduplicator.finish(1, 0, [b"0123456789"])
    assert deduplicator.admit(header(0), b"r")[0] is RequestVerdict.REPEAT


def test_requests_in_flight_per_client_are_limited() -> None:
    deduplicator = RequestDeduplicator(Limits(in_flight_per_client=2))
    assert [deduplicator.admit(header(number), b"r")[0] for number in range(3)] == [
        RequestVerdict.RUN,
        RequestVerdict.RUN,
        RequestVerdict.TOO_MANY,
    ]
    assert deduplicator.admit(header(0, sender=2), b"r")[0] is RequestVerdict.RUN
    deduplicator.finish(1, 0, [])
    assert deduplicator.admit(header(2), b"r")[0] is RequestVerdict.RUN


def test_over_the_limit_the_least_recently_seen_client_is_dropped_unless_its_request_runs() -> None:
    deduplicator = RequestDeduplicator(Limits(num_clients=2))
    deduplicator.admit(header(0, sender=1), b"r")
    deduplicator.admit(header(0, sender=2), b"r")
    assert deduplicator.admit(header(0, sender=3), b"r")[0] is RequestVerdict.TOO_MANY
    deduplicator.finish(2, 0, [b"reply"])
    assert deduplicator.admit(header(0, sender=3), b"r")[0] is RequestVerdict.RUN
    assert (deduplicator.num_clients, deduplicator.kept_replies_bytes) == (2, 0)


def test_a_client_that_never_acknowledges_replies_does_not_fill_the_memory() -> None:
    deduplicator = RequestDeduplicator(Limits(kept_replies_bytes=1000))
    for number in range(3 * WINDOW):
        assert deduplicator.admit(header(number), b"r")[0] is RequestVerdict.RUN
        deduplicator.finish(1, number, [b"0123456789"])
    assert deduplicator.kept_replies_bytes <= 1000
    assert len(deduplicator._clients[1].requests) <= WINDOW + 1


STEPS = ["serve", "reply", "lose request", "lose reply", "resend"]


@settings(max_examples=200)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=60), num_requests=st.integers(1, 20), max_in_flight=st.integers(1, 4))
def test_each_request_runs_once_and_is_answered_on_a_network_that_loses_and_repeats(
    steps: list[str], num_requests: int, max_in_flight: int
) -> None:
    deduplicator = RequestDeduplicator(Limits())
    runs: list[int] = []
    to_server: deque[Header] = deque()
    to_client: deque[tuple[int, bytes]] = deque()
    unanswered: dict[int, None] = {}
    answers: dict[int, bytes] = {}
    started = 0
    for step in [
        *steps,
        *["resend", "serve", "reply"] * num_requests,
    ]:  # at the end nothing is lost any more, and every request must complete
        if started < num_requests and len(unanswered) < max_in_flight:
            unanswered[started] = None
            to_server.append(header(started, answered_below=next(iter(unanswered))))
            started += 1
        if step == "resend" and unanswered:
            to_server.extend(header(number, answered_below=next(iter(unanswered))) for number in unanswered)
        if step == "lose request" and to_server:
            to_server.popleft()
        if step == "lose reply" and to_client:
            to_client.popleft()
        while to_server and step == "serve":
            request = to_server.popleft()
            verdict, answer = deduplicator.admit(request, b"r")
            if verdict is RequestVerdict.RUN:
                runs.append(request.number)
                deduplicator.finish(1, request.number, [b"%d" % request.number])
                to_client.append((request.number, b"%d" % request.number))
            elif verdict is RequestVerdict.REPEAT:
                assert answer is not None
                to_client.append((request.number, bytes(answer[0])))
            else:
                assert verdict is RequestVerdict.STALE
        while to_client and step == "reply":
            number, content = to_client.popleft()
            if number in unanswered:
                del unanswered[number]
                answers[number] = content
    assert sorted(runs) == list(range(num_requests))
    assert answers == {number: b"%d" % number for number in range(num_requests)}
