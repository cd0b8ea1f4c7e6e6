"""The proxies do to a connection what they say, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.network import Network

NUM_BYTES = 50_000


class Echo:
    """Answers every byte with itself, and remembers when a client has ended."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                pass
            self.ended.set()


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Echo(server)
        made.address = server.getsockname()  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def client(network: Network, echo: Echo) -> Iterator[socket.socket]:
    where = network.add("link", echo.address)  # type: ignore[attr-defined]
    with socket.create_connection(where, timeout=60.0) as connection:
        yield connection


def said_back(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    got = b""
    while len(got) < len(data):
        got += client.recv(1 << 16)
    return got


def test_an_open_link_passes_every_byte(client: socket.socket) -> None:
    data = bytes(range(256)) * 1000
    assert said_back(client, data) == data


def test_a_frozen_link_holds_bytes_back_and_loses_none(network: Network, client: socket.socket) -> None:
    network.set("link", "frozen")
    client.sendall(b"held")
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(4)
    client.settimeout(60.0)
    network.set("link", "open")
    assert client.recv(4) == b"held"


def test_a_dribbling_link_is_slow_and_whole(network: Network, client: socket.socket) -> None:
    network.set("link", "dribbling")
    began = time.monotonic()
    assert said_back(client, b"x" * 5_000) == b"x" * 5_000
    assert time.monotonic() - began > 0.1  # 97 bytes each 2 ms, both ways


def test_a_reset_ends_a_connection_at_once_and_lets_the_next_one_in(
    network: Network, client: socket.socket, echo: Echo
) -> None:
    assert said_back(client, b"here") == b"here"
    network.set("link", "reset")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echo.ended.wait(60.0)
    with socket.create_connection(network_address(network), timeout=60.0) as again:
        assert said_back(again, b"here") == b"here"


def network_address(network: Network) -> tuple[str, int]:
    address = network._links["link"]._listen
    assert not isinstance(address, Path)
    return address


def test_a_half_closed_link_tells_the_server_that_its_client_has_ended(
    network: Network, client: socket.socket, echo: Echo
) -> None:
    assert said_back(client, b"here") == b"here"
    network.set("link", "half_closed")
    assert echo.ended.wait(60.0)


def test_a_link_that_refuses_ends_what_is_there_and_comes_back_at_the_same_address(
    network: Network, client: socket.socket
) -> None:
    assert said_back(client, b"here") == b"here"
    network.set("link", "refused")
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection(network_address(network), timeout=60.0)
    network.set("link", "open")
    with socket.create_connection(network_address(network), timeout=60.0) as again:
        assert said_back(again, b"here") == b"here"


def test_a_link_may_be_a_unix_socket(network: Network, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        Echo(server)
        network.add("unix", tmp_path / "server", tmp_path / "proxy")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60.0)
            client.connect(str(tmp_path / "proxy"))
            assert said_back(client, b"x" * NUM_BYTES) == b"x" * NUM_BYTES


def test_a_server_that_is_away_is_no_server(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    where = network.add("away", closed)
    with socket.create_connection(where, timeout=60.0) as client, contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
