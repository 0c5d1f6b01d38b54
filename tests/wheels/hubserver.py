"""A server on the loopback interface that speaks as much of Hugging Face's API as its client asks.

Models are folders: ``OWNER/NAME`` below one folder.  A model named ``gated`` or ``private`` answers
as such a one does.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """A server, what it was asked for, and the token that it wants."""

    def __init__(self, models: Path, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.token = models, token
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """As for GET, without content."""
        self.do_GET()

    def do_GET(self) -> None:
        """A model, or one of its files."""
        self.server.asked.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        given = self.headers.get("Authorization", "")
        name = re.match(r"/(?:api/models/)?([\w.-]+/[\w.-]+)", self.path)
        folder = self.server.models / name[1] if name else self.server.models
        token = self.server.token
        if name and name[1].endswith("/gated") and not given:
            self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name is None or not folder.is_dir() or (token and given != f"Bearer {token}"):
            self.reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.path.startswith("/api/"):
            files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            described = {"id": name[1], "sha": REVISION, "siblings": files}
            self.reply(200, json.dumps(described).encode(), {})
        else:
            self.file(folder / self.path.partition("?")[0].rpartition("/")[2])

    def file(self, file: Path) -> None:
        """A file, or a part of it."""
        if not file.is_file():
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = file.read_bytes()
        tag = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": REVISION}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part:
            first, last = int(part[1]), min(int(part[2]), len(data) - 1)
            place = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self.reply(206, data[first : last + 1], {**tag, **place})
        else:
            self.reply(200, data, tag)

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        """Answer."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub(models: Path, token: str = "") -> Iterator[tuple[str, list[str]]]:
    """The address of such a server, and the paths that it was asked for; with a token for all."""
    with Server(models, token) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked
        finally:
            server.shutdown()
