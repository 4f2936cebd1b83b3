"""What clients and servers do alike with ZeroMQ's sockets."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from rowstead.fleet.wire import COPY_BELOW_BYTES, Buffer, Limits

_PEER_TIMEOUT_S = 5
"""A peer whose machine says nothing for so long is given up, by the system's own TCP. ZeroMQ's heartbeats are left off: where a peer goes
away while its messages wait to be read, version 4.3.5 ends the whole process at the next one (`!_io_error` in `out_event`)."""
_HANDSHAKE_TIMEOUT_S = 5


def configure(socket: zmq.Socket[bytes], address: str, limits: Limits, *, max_queued: int) -> None:
    """Bound what a socket holds for each peer, `max_queued` messages each way, and let it notice peers that are gone."""
    socket.ipv6 = "[" in address
    socket.sndhwm = socket.rcvhwm = max_queued
    socket.maxmsgsize = max(limits.frame_bytes, limits.first_frame_bytes)
    socket.handshake_ivl = _HANDSHAKE_TIMEOUT_S * 1000
    socket.tcp_keepalive = 1  # while nothing is under way: a probe after 2 seconds, and one a second then
    socket.tcp_keepalive_idle = 2
    socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = _PEER_TIMEOUT_S - 2
    socket.tcp_maxrt = _PEER_TIMEOUT_S * 1000  # while something is


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send all frames as one message; large ones are not copied, and live until they are sent."""
    for frame in frames[:-1]:
        socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=len(frame) < COPY_BELOW_BYTES)
    socket.send(frames[-1], zmq.NOBLOCK, copy=len(frames[-1]) < COPY_BELOW_BYTES)


def receive_frames(socket: zmq.Socket[bytes], *, max_frames: int) -> tuple[list[zmq.Frame], int]:
    """The first frames of a message that is there, not copied, and how many there were; those past `max_frames` are thrown away."""
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames, num_frames = [frame], 1
    while frame.more:
        frame = socket.recv(copy=False)
        num_frames += 1
        if num_frames <= max_frames:
            frames.append(frame)
    return frames, num_frames
