"""A whole registry in memory, which can lose blobs, lie about them, and be written to by others.

with MemoryRegistry() as registry:
    copy_image(source, "v1", registry.repository("a/b"), "v1")
    registry.lose(digest)                     # deleted behind everybody's back
    registry.lying.add(digest)                # HEAD says that it is there, GET that it is not
    registry.before = {("PUT", "/v2/a/b/manifests/v1"): intrude}
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from builder.images.registry.model import sha256_digest
from builder.images.registry.reference import Options
from tests.unit.fakeregistry import FakeRegistry, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.images.registry.client import Repository

_ABSENT = b'{"errors": [{"code": "%s", "message": "unknown"}]}'


@dataclass
class MemoryRegistry(FakeRegistry):
    """Blobs and manifests by repository; ``conditional`` is whether it heeds ``If-None-Match``.

    ``mounts`` is whether it mounts blobs.
    """

    answer: Callable[[Request], Reply] = field(init=False)
    conditional: bool = False
    mounts: bool = True
    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[bytes, str]] = field(default_factory=dict)
    lying: set[str] = field(default_factory=set)
    #: what somebody else does at the moment that a request arrives; once
    before: dict[tuple[str, str], Callable[[], object]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _uploads: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answer = self._answer
        super().__post_init__()

    def repository(self, name: str = "a/b", **options: Any) -> Repository:
        """A client's view of it; whole images are sent in pieces of the usual size."""
        return super().repository(name, **{"chunk": Options.chunk, **options})

    def lose(self, digest: str) -> None:
        """Forget a blob everywhere."""
        self.blobs = {key: data for key, data in self.blobs.items() if key[1] != digest}

    def tag(self, name: str, reference: str) -> str | None:
        """The digest of what a tag names now."""
        found = self.manifests.get((name, reference))
        return sha256_digest(found[0]) if found else None

    def _answer(self, request: Request) -> Reply:
        parts = urlsplit(request.path)
        happens = self.before.pop((request.method, parts.path), None)
        if happens:
            happens()
        name, _, rest = parts.path.removeprefix("/v2/").partition("/blobs/")
        if rest.startswith("uploads/"):
            return self._upload(request, name, rest, parse_qs(parts.query))
        if rest:
            return self._blob(request, name, rest)
        name, _, rest = name.partition("/manifests/")
        return self._manifest(request, name, rest) if rest else Reply(404)

    def _blob(self, request: Request, name: str, digest: str) -> Reply:
        data = self.blobs.get((name, digest))
        if digest in self.lying and request.method == "HEAD":
            return Reply(200)
        if data is None or digest in self.lying:
            return Reply(404, _ABSENT % b"BLOB_UNKNOWN")
        wanted = request.headers.get("Range", "")
        if not wanted:
            return Reply(200, data)
        first, last = (int(word) for word in wanted.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return Reply(416)
        headers = {"Content-Range": f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"}
        return Reply(206, data[first : last + 1], headers)

    def _upload(self, request: Request, name: str, rest: str, query: dict[str, list[str]]) -> Reply:
        place = f"/v2/{name}/blobs/{rest}"
        if request.method == "POST":
            digest, source = (query.get(word, [""])[0] for word in ("mount", "from"))
            if self.mounts and ((source, digest) in self.blobs or digest in self.lying):
                self.blobs[name, digest] = self.blobs.get((source, digest), b"")
                return Reply(201)
            place = f"{place}{next(self._numbers)}"
            return Reply(202, headers={"Location": place})
        if request.method == "DELETE":
            self._uploads.pop(place, None)
            return Reply(204)
        self._uploads[place] = data = self._uploads.get(place, b"") + request.body
        if request.method == "PATCH":
            return Reply(202, headers={"Location": place, "Range": f"0-{len(data) - 1}"})
        if sha256_digest(data) != query["digest"][0]:
            return Reply(400)
        self.blobs[name, query["digest"][0]] = data
        return Reply(201)

    def _manifest(self, request: Request, name: str, reference: str) -> Reply:
        found = self.manifests.get((name, reference))
        etag = f'"{sha256_digest(found[0])}"' if found else ""
        if request.method == "PUT":
            wanted = request.headers.get("If-Match", etag)
            taken = found is not None and "If-None-Match" in request.headers
            if self.conditional and (taken or wanted != etag):
                return Reply(412)
            digest = sha256_digest(request.body)
            for key in (reference, digest):
                self.manifests[name, key] = (request.body, request.headers["Content-Type"])
            return Reply(201, headers={"Docker-Content-Digest": digest})
        if found is None:
            return Reply(404, _ABSENT % b"MANIFEST_UNKNOWN")
        headers = {"Content-Type": found[1], "Docker-Content-Digest": etag.strip('"'), "ETag": etag}
        return Reply(200, found[0], headers)
