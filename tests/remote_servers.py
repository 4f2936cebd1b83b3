"""Real servers for tests of remote files: HTTP with range requests, which counts what it sends and fails on demand, and S3."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class FileServer(ThreadingHTTPServer):
    """Serves the files of a folder on this machine."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.lock = threading.Lock()
        self.num_sent_bytes = 0
        self.num_requests = 0
        self.num_failures = 0
        """How many of the next requests are answered by 503."""
        self.status: int | None = None
        """Answer all requests by this status."""
        self.supports_ranges = True
        self.latency_s = 0.0
        self.now = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        server = self.server
        with server.lock:
            server.num_requests += 1
            server.now += 1
            server.most_at_once = max(server.most_at_once, server.now)
            status = server.status or (503 if server.num_failures else None)
            server.num_failures = max(server.num_failures - 1, 0)
        try:
            time.sleep(server.latency_s)
            self._send(status, with_body=with_body)
        finally:
            with server.lock:
                server.now -= 1

    def _send(self, status: int | None, *, with_body: bool) -> None:
        server, path = self.server, self.server.folder / self.path.lstrip("/")
        if status is None and not path.exists():
            status = 404
        if status is not None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if path.is_dir():
            names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir())
            body, content = "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode(), "text/html"
        else:
            body, content = path.read_bytes(), "application/octet-stream"
        asked = self.headers.get("Range") if server.supports_ranges and content != "text/html" else None
        if asked is not None:
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1 if last else len(body), len(body))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
            body = body[start:stop]
        else:
            self.send_response(200)
        self.send_header("Content-Type", content)
        self.send_header("Content-Length", str(len(body)))
        if server.supports_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            self.wfile.write(body)
            with server.lock:
                server.num_sent_bytes += len(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[FileServer]:
    """A server of `folder`, until the block ends."""
    server = FileServer(folder)
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


RCLONE = Path(sys.executable).parent / "rclone"
KEYS = {"AWS_ACCESS_KEY_ID": "ROWSTEADTEST", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """An S3 server (`rclone serve s3`) whose buckets are the folders in `folder`; yields the environment of its clients."""
    program = shutil.which("rclone", path=f"{RCLONE.parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs rclone, which the dev extras install")
    command = [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", ",".join(KEYS.values()), str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(found[1] for line in process.stderr if (found := re.search(r"server on \[(http://[^/]+)", line)))
            yield {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_EC2_METADATA_DISABLED": "true"}
        finally:
            process.terminate()
