"""A read-only registry for one image and its parts, on the loopback interface.

A node's Docker Engine pulls from it through a tunnel, so the engine that will run the image
decides what is transferred, resumed and checked.  The repository's name is a random secret
of this run, so other users of the machine cannot read the image through the port.

A Docker Engine discards the layers of a failed pull.  So a node first pulls images of the
lowest layers, each with a few more than the one before: the engine keeps their layers, and
the next run reuses them.  When the whole image has arrived, their tags are removed.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

from builder.errors import RemoteError
from builder.images.registry.model import RawManifest, sha256_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from types import TracebackType

    from builder.images.registry.model import Descriptor, ImageSource
    from builder.publishing.subject import Image, Subject

# -------------------------------------------------------------------------------- parts of an image


#: Missing bytes in a part: a few seconds on a slow connection.
PART_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """The lowest layers of an image, as an image."""

    manifest: RawManifest
    config: bytes

    @property
    def config_digest(self) -> str:
        """Digest of its configuration."""
        return sha256_digest(self.config)


def parts_of(image: Image, present: Collection[str], limit: int = PART_BYTES) -> Iterator[Part]:
    """Parts that each add about ``limit`` bytes that are not ``present`` (by diff_id).

    The last layers are not a part: they come with the image itself.
    """
    diff_ids = image.settings.diff_ids or ()
    waiting = 0
    for number, (layer, diff_id) in enumerate(zip(image.layers, diff_ids, strict=True), start=1):
        waiting += 0 if diff_id in present else layer.size
        if waiting >= limit and number < len(diff_ids):
            waiting = 0
            yield _part(image, diff_ids[:number])


def _part(image: Image, diff_ids: Sequence[str]) -> Part:
    platform = image.settings.platform
    small = {**platform, "config": {}, "rootfs": {"type": "layers", "diff_ids": list(diff_ids)}}
    data = json.dumps(small, sort_keys=True, separators=(",", ":")).encode()
    layers = image.manifest.json()["layers"][: len(diff_ids)]
    document = {
        "schemaVersion": 2,
        "mediaType": image.manifest.media_type,
        "config": {
            "mediaType": image.config.media_type,
            "digest": sha256_digest(data),
            "size": len(data),
        },
        "layers": layers,
    }
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return Part(manifest=RawManifest(data=raw, media_type=image.manifest.media_type), config=data)


# ------------------------------------------------------------------------------------- the registry


_PATH = re.compile(r"/v2/([a-z0-9]+)/([a-z0-9-]+)/(manifests|blobs)/(sha256:[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_BLOCK = 1 << 20
#: First byte of a TLS connection (RFC 8446, section 5.1).
_TLS_HANDSHAKE = b"\x16"


@dataclass
class Sent:
    """Blobs and bytes that one node has fetched, counted during transfer."""

    blobs: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, count: int, *, blob: bool = False) -> None:
        """Add to the counts; thread-safe."""
        with self._lock:
            self.bytes += count
            self.blobs += blob


class Endpoint:
    """Serves an image; each node has its own secret repository name."""

    def __init__(self, source: ImageSource, subject: Subject) -> None:
        self.source = source
        self.manifests = {image.digest: image.manifest for image in subject.images}
        self.manifests[subject.digest] = subject.root
        self.blobs = {blob.digest: blob for blob in subject.blobs()}
        self.documents: dict[str, bytes] = {}
        self.sent: dict[str, Sent] = {}
        self.problems: list[str] = []
        endpoint = self

        class Handler(_Handler):
            owner = endpoint

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        """The port on this machine's loopback interface."""
        return int(self._server.server_address[1])

    def add_part(self, part: Part) -> str:
        """Also serve a part of the image; returns its digest."""
        self.documents[part.config_digest] = part.config
        self.manifests[part.manifest.digest] = part.manifest
        return part.manifest.digest

    def repository(self) -> str:
        """A new repository name for the same image."""
        name = secrets.token_hex(16)
        self.sent[name] = Sent()
        return f"{name}/image"

    def counted(self, repository: str) -> Sent:
        """The counts of a repository so far."""
        return self.sent[repository.partition("/")[0]]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Handles requests for manifests and blobs by digest, whole or from an offset."""

    protocol_version = "HTTP/1.1"
    owner: Endpoint

    def handle(self) -> None:
        """Reply to a TLS handshake with the response by which engines detect plain HTTP."""
        with contextlib.suppress(OSError):  # a connection that is cut is the engine's to mend
            if self.connection.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
                self.connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                return
            super().handle()

    def log_message(self, *_words: object) -> None:
        """No log: the node's engine reports progress, and this side counts."""

    def do_HEAD(self) -> None:
        """Like GET, without the body."""
        self._answer(send=False)

    def do_GET(self) -> None:
        """A manifest or a blob."""
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        if self.path in ("/v2", "/v2/"):
            self._bytes(b"{}", "application/json", send=send)
            return
        match = _PATH.fullmatch(self.path)
        sent = self.owner.sent.get(match[1]) if match else None
        if match is None or sent is None or match[2] != "image":
            self._absent()
            return
        digest = match[4]
        if match[3] == "manifests" and digest in self.owner.manifests:
            manifest = self.owner.manifests[digest]
            self._bytes(manifest.data, manifest.media_type, digest=digest, send=send)
        elif match[3] == "blobs" and digest in self.owner.documents:
            data = self.owner.documents[digest]
            self._bytes(data, "application/octet-stream", digest=digest, send=send)
        elif match[3] == "blobs" and digest in self.owner.blobs:
            self._blob(self.owner.blobs[digest], sent, send=send)
        else:
            self._absent()

    def _bytes(self, data: bytes, media_type: str, *, send: bool, digest: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Distribution-API-Version", "registry/2.0")
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if send:
            self.wfile.write(data)

    def _absent(self) -> None:
        data = json.dumps({"errors": [{"code": "NOT_FOUND", "message": "not here"}]}).encode()
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _blob(self, blob: Descriptor, sent: Sent, *, send: bool) -> None:
        start, stop = self._range(blob.size)
        if start > stop:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{blob.size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        whole = (start, stop) == (0, blob.size - 1) and "Range" not in self.headers
        self.send_response(200 if whole else 206)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start + 1))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Docker-Content-Digest", blob.digest)
        if not whole:
            self.send_header("Content-Range", f"bytes {start}-{stop}/{blob.size}")
        self.end_headers()
        if send:
            self._stream(blob, start, stop, sent)

    def _range(self, size: int) -> tuple[int, int]:
        """First and last requested byte; first > last for an invalid range."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            return 0, max(size - 1, 0)
        stop = int(match[2]) if match[2] else size - 1
        return int(match[1]), min(stop, size - 1)

    def _stream(self, blob: Descriptor, start: int, stop: int, sent: Sent) -> None:
        """Send a range; preceding bytes are read and discarded, so that the digest is checked."""
        position = 0
        sent.add(0, blob=start == 0)
        try:
            with self.owner.source.open(blob) as stream:
                while position <= stop and (data := stream.read(_BLOCK)):
                    part = data[max(0, start - position) : stop + 1 - position]
                    position += len(data)
                    if part:
                        self.wfile.write(part)
                        sent.add(len(part))
        except RemoteError as error:
            self.owner.problems.append(str(error))
            self.close_connection = True
            self.connection.close()
        except OSError:  # the node has gone; it asks again, or its command fails
            self.close_connection = True
