"""A registry that says whatever a test wants it to say, on a real socket."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from builder.images.registry.client import Registry, Repository
from builder.images.registry.model import OCI_CONFIG, OCI_MANIFEST, sha256_digest
from builder.images.registry.reference import Options
from tests.loopback import LoopbackHandler, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

QUICK = Options(backoff=0.001, read_timeout=2.0, chunk=4, attempts=3, settle=0.0)


@dataclass(frozen=True)
class Request:
    """What the client has sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    """What it gets.

    ``length`` is what the answer claims (-1: nothing), ``cut`` closes after the body; status 0 is
    no answer at all.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    cut: bool = False


@dataclass
class FakeRegistry(LoopbackServer):
    """Answers each request with what ``answer`` makes of it."""

    answer: Callable[[Request], Reply]
    log: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listen(_Handler)

    def repository(self, name: str = "a/b", **options: Any) -> Repository:
        """A client's view of it."""
        chosen = Options(**{**vars(QUICK), "plain_http": frozenset({self.address}), **options})
        return Registry(self.address, chosen).repository(name)


class _Handler(LoopbackHandler):
    protocol_version = "HTTP/1.1"
    owner: FakeRegistry

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        self.owner.log.append(request)
        reply = self.owner.answer(request)
        if not reply.status:
            self.close_connection = True
            return
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.length != -1:
            length = len(reply.body) if reply.length is None else reply.length
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
        self.close_connection = reply.cut or reply.length == -1

    def do_GET(self) -> None:
        self._any()

    def do_HEAD(self) -> None:
        self._any()

    def do_POST(self) -> None:
        self._any()

    def do_PUT(self) -> None:
        self._any()

    def do_PATCH(self) -> None:
        self._any()

    def do_DELETE(self) -> None:
        self._any()


def serve(*replies: Reply) -> FakeRegistry:
    """One after the other, the last one for ever."""
    left = list(replies)
    return FakeRegistry(lambda _request: left.pop(0) if len(left) > 1 else left[0])


def manifest(**changes: Any) -> bytes:
    """A manifest with a config and no layer, or with something else wrong."""
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": sha256_digest(b"{}"), "size": 2},
        "layers": [],
    }
    value.update(changes)
    return json.dumps({key: value for key, value in value.items() if value is not None}).encode()
