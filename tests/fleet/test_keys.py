"""Only the owner can read keys, and addresses that other users can reach need them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from rowstead.fleet.keys import Keys, check_address
from rowstead.fleet.local_sockets import open_socket_folder, socket_address
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.rpc_server import Server
from rowstead.spec.errors import RowsteadError


def test_saved_keys_are_readable_by_their_owner_only_and_load_again(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert Keys.load(tmp_path / "keys.json") == keys


def test_secrets_are_not_shown() -> None:
    keys = Keys.generate()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in str(keys)


def test_every_job_has_its_own_keys() -> None:
    assert Keys.generate() != Keys.generate()


def test_keys_of_another_job_are_not_overwritten(tmp_path: Path) -> None:
    first = Keys.generate()
    first.save(tmp_path / "keys.json")
    with pytest.raises(RowsteadError, match="already exists"):
        Keys.generate().save(tmp_path / "keys.json")
    assert Keys.load(tmp_path / "keys.json") == first


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "keys.json")
    (tmp_path / "keys.json").chmod(0o640)
    with pytest.raises(RowsteadError, match="chmod 600"):
        Keys.load(tmp_path / "keys.json")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"server_public": "x"}', None])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    with pytest.raises(RowsteadError, match="keys"):
        Keys.load(path)


def test_damaged_keys_are_refused(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "keys.json")
    content = json.loads((tmp_path / "keys.json").read_text())
    (tmp_path / "keys.json").write_text(json.dumps({**content, "client_secret": "~" * 40}))
    with pytest.raises(RowsteadError, match="not a key file"):
        Keys.load(tmp_path / "keys.json")


def test_a_unix_socket_needs_no_keys_but_a_folder_that_other_users_cannot_enter() -> None:
    with open_socket_folder() as folder:
        address = socket_address(folder, "server")
        check_address(address, None)
        for mode in (0o755, 0o710, 0o701, 0o777):
            folder.chmod(mode)
            with pytest.raises(RowsteadError, match="other users can enter"):
                Server({}, address=address)
            with pytest.raises(RowsteadError, match="other users can enter"):
                Client(address, name="me")


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:0",
        "tcp://localhost:80",
        "tcp://[::1]:0",
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://10.0.0.1:5555",
        "tcp://example.org:80",
        "tcp://[::]:0",
        "tcp://[2001:db8::1]:1",
    ],
)
def test_an_address_that_other_users_can_reach_is_refused_without_keys(address: str) -> None:
    check_address(address, Keys.generate())
    with pytest.raises(RowsteadError, match="needs keys"):
        check_address(address, None)
    with pytest.raises(RowsteadError, match="needs keys"):
        Server({}, address=address)
    with pytest.raises(RowsteadError, match="needs keys"):
        Client(address, name="me")
    with pytest.raises(RowsteadError, match="needs keys"), Client(lambda: address, name="me") as client:
        client.call("anything")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:5",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:70000",
        "ipc://@abstract",
        "ipc://x",
        f"ipc:///{103 * 'x'}",
        "tcp://a:1;b:2",
    ],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(RowsteadError, match="invalid address"):
        check_address(address, Keys.generate())


def test_the_error_names_an_address_in_use() -> None:
    keys = Keys.generate()
    with (
        Server({}, address="tcp://127.0.0.1:0", keys=keys) as server,
        pytest.raises(RowsteadError, match="cannot listen on"),
    ):
        Server({}, address=server.address, keys=keys)
