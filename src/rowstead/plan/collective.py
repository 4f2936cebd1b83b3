"""Seconds of collectives: all-reduce and all-to-all on each topology, and between servers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rowstead.spec.machine import Accelerators, Topology

CUBE_MESH_DIRECT = 4
"""Peers that a GPU of a hybrid cube mesh of eight has a link to; the remaining three are two hops away."""


@dataclass(frozen=True)
class Fabric:
    """The links between devices: topology, bandwidth of one device in one direction, and latency."""

    topology: Topology
    bytes_per_s: float
    latency_s: float


def fabric_of(accelerators: Accelerators, num_used: int) -> Fabric:
    """The fabric between `num_used` devices of a server; without peer links they communicate through host memory.

    Links to unused devices stay idle, except on a switch.
    """
    peer = accelerators.peer_link
    if peer is None or peer.bandwidth_bytes_per_s is None:
        return Fabric("through_host", accelerators.host_bytes_per_s(num_used), 2 * accelerators.host_link.latency_s)
    share = 1.0
    if peer.topology != "switched" and 1 < num_used < accelerators.num:
        wired = [hops_of(peer.topology, number).count(1) for number in (num_used, accelerators.num)]
        share = wired[0] / wired[1]
    return Fabric(peer.topology, share * peer.bandwidth_bytes_per_s, peer.latency_s)


def all_reduce_s(fabric: Fabric, num_devices: int, num_bytes: float) -> float:
    """Seconds of an all-reduce of `num_bytes`, by the faster of ring and tree.

    In a ring, which each of these topologies contains, every device sends 2 (n - 1) / n of the bytes in 2 (n - 1) rounds; a hybrid
    cube mesh uses all its links in several rings. A tree needs fewer rounds, which is faster for small messages.
    Through the host, each part is copied up and down one after the other.
    """
    if num_devices == 1 or num_bytes == 0:
        return 0.0
    # through the host each byte crosses a link twice, up and down
    bytes_per_s = fabric.bytes_per_s / 2 if fabric.topology == "through_host" else fabric.bytes_per_s
    rounds = 2 * (num_devices - 1)
    ring_s = rounds * (fabric.latency_s + num_bytes / num_devices / bytes_per_s)
    tree_s = 2 * math.ceil(math.log2(num_devices)) * (fabric.latency_s + num_bytes / bytes_per_s)
    return min(ring_s, tree_s)


def all_to_all_s(fabric: Fabric, num_devices: int, num_bytes: float) -> float:
    """Seconds of an all-to-all in which each device sends `num_bytes` in total, an n-th of it to itself.

    All sends overlap; a message that takes several hops occupies the links of the devices in between.
    """
    if num_devices == 1 or num_bytes == 0:
        return 0.0
    hops = hops_of(fabric.topology, num_devices)
    sent = num_bytes * (num_devices - 1) / num_devices
    return max(hops) * fabric.latency_s + sent * (sum(hops) / len(hops)) / fabric.bytes_per_s


def hops_of(topology: Topology, num_devices: int) -> list[int]:
    """Links between one device and each of the others."""
    others = num_devices - 1
    if topology == "through_host":
        return [2] * others
    if topology == "ring":
        return [min(step, num_devices - step) for step in range(1, num_devices)]
    if topology == "hybrid_cube_mesh":
        direct = min(CUBE_MESH_DIRECT, others)
        return [1] * direct + [2] * (others - direct)
    return [1] * others


def across_servers_s(bytes_per_s: float, latency_s: float, num_servers: int, num_bytes: float, *, reduce: bool) -> float:
    """Seconds of an all-reduce (or else of an all-to-all) between servers on a switched network, `num_bytes` of each server."""
    if num_servers == 1 or num_bytes == 0:
        return 0.0
    share = (num_servers - 1) / num_servers
    if reduce:
        return 2 * math.ceil(math.log2(num_servers)) * latency_s + 2 * share * num_bytes / bytes_per_s
    return (num_servers - 1) * latency_s + share * num_bytes / bytes_per_s
