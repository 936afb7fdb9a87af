"""A real S3 server process for tests (moto's), and a wire to it that can be cut, slowed or made to stutter.

A test module imports the fixtures that it needs. Nothing here runs inside what is tested: the server is a process, the
wire a proxy in front of it that counts requests and fails as networks do.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class S3:
    """The server: its endpoint, and buckets by name."""

    def __init__(self, folder: Path) -> None:
        with (folder / "moto.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "moto.server", "-p", "0"], stdout=log, stderr=subprocess.STDOUT
            )
        self.port = self._port(folder / "moto.log")
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def _port(self, log: Path) -> int:
        for _ in range(1200):
            if found := re.search(rb"Running on http://127.0.0.1:(\d+)", log.read_bytes()):
                return int(found[1])
            assert self.process.poll() is None, log.read_text()
            threading.Event().wait(0.05)
        raise AssertionError(f"moto did not start: {log.read_text()}")

    def make_bucket(self) -> Objects:
        """A new, empty bucket."""
        name = f"b{uuid.uuid4().hex[:16]}"
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request("PUT", f"/{name}", headers=headers)
            assert connection.getresponse().status == 200
        return Objects(name, self.endpoint)


class Objects:
    """A bucket as anyone else's tool sees it."""

    def __init__(self, name: str, endpoint: str) -> None:
        self.name = name
        self.store: Any = S3Store(
            name,
            endpoint=endpoint,
            access_key_id="test",
            secret_access_key="secret",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def url(self, prefix: str = "x.zarr") -> str:
        return f"s3://{self.name}/{prefix}"

    def keys(self, prefix: str | None = None) -> list[str]:
        return sorted(item["path"] for page in obstore.list(self.store, prefix) for item in page)

    def read(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def write(self, key: str, data: bytes) -> None:
        obstore.put(self.store, key, data)

    def delete(self, key: str) -> None:
        obstore.delete(self.store, key)


class Wire:
    """A proxy to the server. `rule` is asked for each request, with its number from 0, how it is to go wrong."""

    def __init__(self, port: int) -> None:
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range of every request."""
        self.rule: Callable[[int, str, str], str] = lambda _number, _method, _path: "pass"
        lock = threading.Lock()
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                with lock:
                    number = len(wire.requests)
                    wire.requests.append((self.command, self.path, self.headers.get("Range", "")))
                fault = wire.rule(number, self.command, self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if fault == "cut":
                    self.close_connection = True
                    return
                if fault == "busy":
                    self._send(503, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>")
                    return
                # Closed also when whoever asked was killed: one that is left open is an error of some later test.
                with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    got = connection.getresponse()
                    data = got.read()
                if fault == "lost answer":  # the server did it, the client never hears
                    self.close_connection = True
                    return
                self._send(got.status, dict(got.getheaders()), data)

            def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = headers.get("Content-Length") or headers.get("content-length") or str(len(data))
                self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
                self.end_headers()
                self.wfile.write(data if self.command != "HEAD" else b"")

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *_arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True, name="wire").start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session", name="s3_process")
def s3_process_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("s3"))
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(name="s3")
def s3_fixture(s3_process: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    """The server, with the environment that reaches it."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_process.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return s3_process


@pytest.fixture(name="wire")
def wire_fixture(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """What we do goes through here, what the test itself does straight to the server."""
    made = Wire(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()
