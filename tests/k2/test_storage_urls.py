import socket
import threading
from collections.abc import Iterator

import pytest

from k2 import storage
from k2.errors import K2Error

BODY = b"hello"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nAccept-Ranges: bytes\r\nConnection: close\r\n\r\n"


class Server:
    """A real TCP server that hangs up on the first `failures` connections, then serves BODY (404 for /missing)."""

    def __init__(self) -> None:
        self.failures, self.connections = 0, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                if self.connections <= self.failures:
                    continue
                request = connection.recv(65536)
                if b"/missing" in request:
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                else:
                    connection.sendall(OK + (b"" if request.startswith(b"HEAD") else BODY))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    import fsspec

    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    fsspec.filesystem("http").clear_instance_cache()
    server = Server()
    yield server
    server.socket.close()


def test_an_address_is_one_file_and_is_read(server: Server):
    address = f"{server.url}/x.txt"
    assert storage.list_files(address) == [address]
    with storage.open_file(address) as file:
        assert file.read() == BODY


def test_a_server_that_hangs_up_is_asked_again(server: Server):
    """Failures that may pass are tried again, up to the limit; then the address is named."""
    server.failures = 3  # an attempt is up to three connections: HEAD, GET and the client's own retry
    with storage.open_file(f"{server.url}/x.txt") as file:
        assert file.read() == BODY
    server.failures = 10**6
    with pytest.raises(K2Error, match=rf"{server.url}/x.txt: cannot be reached .*check the network"):
        with storage.open_file(f"{server.url}/x.txt") as file:
            file.read()


def test_what_is_not_there_is_said_at_once(server: Server):
    """A 404 is an answer, not an outage: no second attempt."""
    with pytest.raises(K2Error, match=rf"{server.url}/missing: not found"):
        with storage.open_file(f"{server.url}/missing") as file:
            file.read()
    assert server.connections <= 2  # HEAD and GET of one attempt
