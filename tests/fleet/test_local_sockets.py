"""Roles of one machine talk over Unix sockets that no other user can reach."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from rowstead.fleet.keys import check_address
from rowstead.fleet.local_sockets import open_socket_folder, socket_address
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.rpc_server import Server
from tests.fleet.echo_server import Process, echo

NOBODY = 65534


def path_of(server: Server) -> Path:
    return Path(server.address.removeprefix("ipc://"))


def test_a_server_without_an_address_listens_on_no_port_and_only_its_user_can_enter_its_folder() -> None:
    before = {each.laddr for each in psutil.Process().net_connections("inet")}
    with Server({"echo": echo}).start() as server, Client(server.address, name="me") as client:
        assert client.call("echo", {"n": 1}).facts["n"] == 1
        assert {each.laddr for each in psutil.Process().net_connections("inet")} <= before
        folder = path_of(server).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def can_connect(user: int, path: Path) -> bool:
    """Whether a process of another user can connect to a socket."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        socket.socket(socket.AF_UNIX).connect(str(path))
        code = 0
    finally:
        os._exit(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect() -> None:
    with Server({"echo": echo}).start() as server:
        assert not can_connect(NOBODY, path_of(server))
        path_of(server).chmod(0o777)
        assert not can_connect(NOBODY, path_of(server)), "the mode of the folder is what counts"
        path_of(server).parent.chmod(0o755)
        assert can_connect(NOBODY, path_of(server)), "the same attack succeeds where the folder is open"


def test_a_temporary_folder_with_a_long_path_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with open_socket_folder() as folder:
        check_address(socket_address(folder, "trainer-1000-1000"), None)
        with Server({}, address=socket_address(folder, "trainer-1000-1000")):
            assert not list(deep.iterdir())


def test_a_client_finds_a_server_that_was_killed_and_started_again_at_the_same_socket() -> None:
    """The socket of the killed one is still there; the new one replaces it."""
    with open_socket_folder() as folder:
        address = socket_address(folder, "sparse-0")
        with Client(address, name="me", deadline_s=60) as client:
            with Process(address) as first:
                assert first.address == address
                assert client.call("count").facts["num_requests"] == 1
            assert Path(folder, "sparse-0").is_socket()
            with Process(address):
                assert client.call("count").facts["num_requests"] == 1
