"""ZeroMQ socket options, sending and receiving, for clients and servers."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from rowstead.fleet.wire import COPY_BELOW_BYTES, Buffer, Limits

_PEER_TIMEOUT_S = 5
"""A peer that is silent for this long is dropped by TCP keepalive. ZeroMQ's heartbeats stay off: when a peer disconnects while
its messages are unread, version 4.3.5 aborts the process at the next heartbeat (`!_io_error` in `out_event`)."""
_HANDSHAKE_TIMEOUT_S = 5


def configure(socket: zmq.Socket[bytes], address: str, limits: Limits, *, max_queued: int) -> None:
    """Bound the queues of a socket to `max_queued` messages per peer and direction, and detect lost peers."""
    socket.ipv6 = "[" in address
    socket.sndhwm = socket.rcvhwm = max_queued
    socket.maxmsgsize = max(limits.frame_bytes, limits.first_frame_bytes)
    socket.handshake_ivl = _HANDSHAKE_TIMEOUT_S * 1000
    socket.tcp_keepalive = 1  # on an idle connection: a probe after 2 seconds, then one per second
    socket.tcp_keepalive_idle = 2
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = _PEER_TIMEOUT_S - 2
    socket.tcp_maxrt = _PEER_TIMEOUT_S * 1000  # with unacknowledged data


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send all frames as one message; large frames are sent without a copy."""
    for frame in frames[:-1]:
        socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=len(frame) < COPY_BELOW_BYTES)
    socket.send(frames[-1], zmq.NOBLOCK, copy=len(frames[-1]) < COPY_BELOW_BYTES)


def send_tracked(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> zmq.MessageTracker:
    """Send all frames as one message, and return what tells when ZeroMQ has passed on the largest of them."""
    largest = max(range(len(frames)), key=lambda index: len(frames[index]))
    tracked = zmq.Frame(frames[largest], track=True, copy=False)
    tracker: zmq.MessageTracker = tracked.tracker
    for index, frame in enumerate(frames):
        more = zmq.NOBLOCK if index == len(frames) - 1 else zmq.SNDMORE | zmq.NOBLOCK
        if index == largest:
            socket.send(tracked, more, copy=False)
        else:
            socket.send(frame, more, copy=len(frame) < COPY_BELOW_BYTES)
    return tracker


def receive_frames(socket: zmq.Socket[bytes], *, max_frames: int) -> tuple[list[zmq.Frame], int]:
    """Return the first frames of the next message, not copied, and their number; frames after `max_frames` are discarded."""
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames, num_frames = [frame], 1
    while frame.more:
        frame = socket.recv(copy=False)
        num_frames += 1
        if num_frames <= max_frames:
            frames.append(frame)
    return frames, num_frames
