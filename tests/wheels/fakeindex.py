"""A package index on the loopback interface, with tiny wheels and faults that are switched on."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.loopback import LoopbackHandler, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_JSON = "application/vnd.pypi.simple.v1+json"


def build_wheel(
    name: str,
    version: str,
    files: Mapping[str, bytes],
    requires: Sequence[str] = (),
    metadata: bytes | None = None,
) -> bytes:
    """A wheel with a true RECORD; the same input gives the same bytes.

    RECORD is not compressed, so that a wheel with other hashes in it can have the same length.
    """
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    whole = dict(files)
    whole[f"{info}/METADATA"] = metadata or ("\n".join(lines) + "\n").encode()
    whole[f"{info}/WHEEL"] = wheel.encode()
    rows = [f"{path},{_record_hash(data)},{len(data)}" for path, data in whole.items()]
    whole[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in whole.items():
            stored = path.endswith("RECORD") or not data
            kind = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(path), data, kind)
    return out.getvalue()


def _record_hash(data: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + raw.rstrip(b"=").decode()


def noise(seed: int, size: int) -> bytes:
    """Bytes that no compression shrinks, the same each time."""
    return random.Random(seed).randbytes(size)


@dataclass
class Faults:
    """What goes wrong; all off at first.  Keys are file names, or project names for pages."""

    #: answer with this status
    status: dict[str, int] = field(default_factory=dict)
    #: close the connection after so many bytes of the body
    cut: dict[str, int] = field(default_factory=dict)
    #: serve these bytes, whatever the page says the sha256 is
    swap: dict[str, bytes] = field(default_factory=dict)
    #: say this sha256 on the page
    page_sha256: dict[str, str] = field(default_factory=dict)
    #: answer a range request with the whole file
    no_ranges: bool = False
    #: close the connection on HEAD
    no_head: bool = False
    #: a page in HTML, which does not say how large a file is
    html: bool = False
    #: content type and bytes of a project's page
    page: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    #: send zeros after the body until the client hangs up, without a length
    endless: set[str] = field(default_factory=set)
    #: the reason for which a file was yanked
    yanked: dict[str, str] = field(default_factory=dict)
    #: seconds to wait before each 64 kB
    delay: float = 0.0


class FakeIndex(LoopbackServer):
    """Serves ``/simple/PROJECT/`` and ``/files/NAME``; use it as a context manager."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults = Faults()
        self.requests: list[str] = []
        self.listen(_Handler)

    @property
    def root(self) -> str:
        """The server's address."""
        return super().url

    @property
    def url(self) -> str:
        """The simple index."""
        return f"{self.root}/simple"

    def add(
        self,
        name: str,
        version: str,
        files: Mapping[str, bytes],
        requires: Sequence[str] = (),
    ) -> str:
        """Publish a wheel; its file name."""
        filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        self.files[filename] = build_wheel(name, version, files, requires)
        return filename

    def sha256(self, filename: str) -> str:
        """What a wheel's digest really is."""
        return hashlib.sha256(self.files[filename]).hexdigest()

    def page(self, project: str) -> list[tuple[str, str, int]]:
        """File name, sha256 and size of every wheel of a project."""
        prefix = project.replace("-", "_") + "-"
        return [
            (name, self.faults.page_sha256.get(name, self.sha256(name)), len(data))
            for name, data in self.files.items()
            if name.startswith(prefix)
        ]


class _Handler(LoopbackHandler):
    owner: FakeIndex
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        if self.owner.faults.no_head:
            self.close_connection = True
            return
        self.do_GET()

    def do_GET(self) -> None:
        faults = self.owner.faults
        self.owner.requests.append(f"{self.command} {self.path}")
        kind, _, name = self.path.strip("/").partition("/")
        if name in faults.status:
            self._answer(faults.status[name], b"no", {})
        elif kind == "simple":
            self._page(name)
        elif name in self.owner.files:
            self._file(name)
        else:
            self._answer(404, b"no such file", {})

    def _page(self, project: str) -> None:
        rows = self.owner.page(project)
        root = self.owner.root
        faults = self.owner.faults
        if project.strip("/") in faults.page:
            kind, body = faults.page[project.strip("/")]
            self._answer(200, body, {"Content-Type": kind}, project.strip("/"))
        elif not rows:
            self._answer(404, b"no such project", {})
        elif self.owner.faults.html:
            links = [f'<a href="{root}/files/{n}#sha256={s}">{n}</a>' for n, s, _ in rows]
            text = "<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>"
            self._answer(200, text.encode(), {"Content-Type": "text/html"}, project)
        else:
            files = [
                {"filename": n, "url": f"{root}/files/{n}", "hashes": {"sha256": s}, "size": z,
                 "yanked": faults.yanked.get(n, False)}
                for n, s, z in rows
            ]  # fmt: skip
            page = {"meta": {"api-version": "1.1"}, "name": project, "files": files, "versions": []}
            self._answer(200, json.dumps(page).encode(), {"Content-Type": _JSON}, project)

    def _file(self, name: str) -> None:
        data = self.owner.faults.swap.get(name, self.owner.files[name])
        wanted = self.headers.get("Range", "")
        if not wanted or self.owner.faults.no_ranges:
            self._answer(200, data, {"Accept-Ranges": "bytes"}, name)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), int(last) + 1 if last else len(data)
        if start >= len(data):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        part = data[start:stop]
        span = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        self._answer(206, part, {"Content-Range": span}, name)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        endless = name in self.owner.faults.endless
        if not endless:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if endless:
            self.close_connection = True
            with suppress(ConnectionError):
                while True:
                    self.wfile.write(body + bytes(1 << 20))
        cut = self.owner.faults.cut.get(name, len(body))
        with suppress(ConnectionError):  # the client was interrupted
            self._send(body[:cut])
        if cut < len(body):
            self.close_connection = True
            self.connection.close()

    def _send(self, body: bytes) -> None:
        for at in range(0, len(body), 1 << 16):
            time.sleep(self.owner.faults.delay)
            self.wfile.write(body[at : at + (1 << 16)])
            self.wfile.flush()
