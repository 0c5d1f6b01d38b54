"""Uploads to registries of every kind: choosy, forgetful, broken, and far away."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import parse_qs, urlsplit

import pytest
import requests

from builder.errors import RemoteError
from builder.images.registry import client as uploads
from builder.images.registry.client import Repository, UploadFailed
from builder.images.registry.model import OCI_MANIFEST, Descriptor, RawManifest, sha256_digest
from tests.unit.fakeregistry import QUICK, FakeRegistry, Reply, Request, manifest, serve

DATA = b"0123456789abcdefghij"
BLOB = Descriptor(media_type="", digest=sha256_digest(DATA), size=len(DATA))


class Once(io.BytesIO):
    """A stream that cannot go back, like one from another registry."""

    def seekable(self) -> bool:
        return False


@dataclass
class Store:
    """A registry's uploads, in memory, with the habits of one registry or another."""

    absolute: bool = False
    least: int = 0
    most: int = 1 << 30
    too_large: int = 413
    patched: int = 202
    stale_range: bool = False
    range_end: str = ""
    forgets: bool = False
    sessions: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    #: numbers of PATCH and PUT requests that break off, and how many bytes are kept of them
    cuts: dict[int, int] = field(default_factory=dict)
    pieces: list[tuple[str, str, bytes]] = field(default_factory=list)
    base: str = ""

    def answer(self, request: Request) -> Reply:
        parts = urlsplit(request.path)
        if "/blobs/uploads/" not in parts.path:
            found = self.blobs.get(parts.path.rpartition("/")[2])
            return Reply(404) if found is None else Reply(body=found)
        name = parts.path.rpartition("/")[2]
        if request.method == "POST":
            name = str(len(self.sessions))
            self.sessions[name] = b""
            least = {"OCI-Chunk-Min-Length": str(self.least)} if self.least else {}
            return Reply(202, headers={**self._where(name), **least})
        if name not in self.sessions:
            return Reply(404, b'{"errors": [{"code": "BLOB_UPLOAD_UNKNOWN"}]}')
        if request.method in ("PATCH", "PUT"):
            return self._take(request, name, parse_qs(parts.query).get("digest", [""])[0])
        if request.method == "DELETE":
            del self.sessions[name]
            return Reply(204)
        return Reply(204, headers={**self._where(name), **self._range(name)})

    def _take(self, request: Request, name: str, digest: str) -> Reply:
        if len(request.body) > self.most:
            return Reply(self.too_large)
        number = len(self.pieces)
        self.pieces.append((request.method, request.headers.get("Content-Range", ""), request.body))
        kept = self.cuts.get(number, len(request.body))
        self.sessions[name] += request.body[:kept]
        if number in self.cuts:
            if self.forgets:
                del self.sessions[name]
            return Reply(0)
        if not digest:
            return Reply(self.patched, headers={**self._where(name), **self._range(name)})
        data = self.sessions.pop(name)
        if sha256_digest(data) != digest:
            return Reply(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        self.blobs[digest] = data
        return Reply(201)

    def _where(self, name: str) -> dict[str, str]:
        base = self.base if self.absolute else ""
        return {"Location": f"{base}/v2/a/b/blobs/uploads/{name}?state=x%2By"}

    def _range(self, name: str) -> dict[str, str]:
        have = min(4, len(self.sessions[name])) if self.stale_range else len(self.sessions[name])
        return {"Range": f"0-{self.range_end or max(0, have - 1)}"}


def send(store: Store, content: IO[bytes], blob: Descriptor = BLOB, piece: int = 8) -> FakeRegistry:
    with FakeRegistry(store.answer) as fake:
        store.base = fake.url
        fake.repository(chunk=piece).put_blob(blob, content)
    return fake


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
@pytest.mark.parametrize("content", [io.BytesIO, Once])
def test_upload_in_pieces(content: type[io.BytesIO], absolute: bool) -> None:
    store = Store(absolute=absolute)
    fake = send(store, content(DATA))
    assert store.blobs == {BLOB.digest: DATA}
    assert store.pieces == [
        ("PATCH", "0-7", DATA[:8]),
        ("PATCH", "8-15", DATA[8:16]),
        ("PUT", "16-19", DATA[16:]),
    ]
    assert [request.method for request in fake.log] == ["HEAD", "POST", "PATCH", "PATCH", "PUT"]
    assert "state=x%2By" in fake.log[-1].path


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_a_token_that_expires_during_an_upload_is_renewed(method: str) -> None:
    """The piece that was refused is sent once more, and the upload goes on."""
    store = Store()
    tokens = 0

    def answer(request: Request) -> Reply:
        nonlocal tokens
        if request.path.startswith("/token"):
            tokens += 1
            return Reply(body=json.dumps({"token": f"t{tokens}"}).encode())
        expired = request.method == method and tokens == 2
        if expired or request.headers.get("Authorization") != f"Bearer t{tokens}":
            challenge = f'Bearer realm="{fake.url}/token",service="reg"'
            return Reply(401, headers={"WWW-Authenticate": challenge})
        return store.answer(request)

    fake = FakeRegistry(answer)
    with fake:
        fake.repository(chunk=8).put_blob(BLOB, Once(DATA))
    assert (tokens, store.blobs) == (3, {BLOB.digest: DATA}), "to read, to write, to go on"
    assert [range_ for _, range_, _ in store.pieces] == ["0-7", "8-15", "16-19"]
    sent = [request.method for request in fake.log if request.method in ("PATCH", "PUT")]
    assert sent == sorted(["PATCH", "PATCH", "PUT", method])
    renewed = [n for n, request in enumerate(fake.log) if "/token" in request.path][-1]
    assert fake.log[renewed + 1].method == method, "the registry need not be asked what it has"


@pytest.mark.parametrize("piece", [len(DATA), 100])
def test_upload_in_one_piece(piece: int) -> None:
    store = Store()
    send(store, Once(DATA), piece=piece)
    assert store.pieces == [("PUT", "", DATA)]


def test_upload_of_an_empty_blob() -> None:
    store = Store()
    blob = Descriptor(media_type="", digest=sha256_digest(b""), size=0)
    send(store, Once(b""), blob)
    assert store.pieces == [("PUT", "", b"")]
    assert store.blobs == {blob.digest: b""}


def test_existing_blobs_are_not_sent() -> None:
    store = Store(blobs={BLOB.digest: DATA})
    assert [request.method for request in send(store, Once(DATA)).log] == ["HEAD"]


@pytest.mark.parametrize("kept", [0, 3, 8], ids=["nothing", "a part", "all"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_upload_resumes_at_the_offset_of_the_registry(number: int, kept: int) -> None:
    """Only what is missing of the piece is sent again, from a stream that cannot go back."""
    store = Store(cuts={number: kept})
    send(store, Once(DATA))
    assert store.blobs == {BLOB.digest: DATA}
    assert sum(len(body) for _, _, body in store.pieces) == len(DATA) + 8 - kept
    if kept < 8:
        start = number * 8 + kept
        assert store.pieces[number + 1][1].startswith(f"{start}-")


@pytest.mark.parametrize("kept", [0, 2, 4])
def test_the_last_piece_is_interrupted(kept: int) -> None:
    store = Store(cuts={2: kept})
    send(store, Once(DATA))
    assert store.blobs == {BLOB.digest: DATA}


def test_an_upload_forgotten_by_the_registry_is_restarted() -> None:
    store = Store(cuts={1: 3}, forgets=True)
    send(store, io.BytesIO(DATA))
    assert store.blobs == {BLOB.digest: DATA}
    assert [piece[0] for piece in store.pieces] == ["PATCH", "PATCH", "PATCH", "PATCH", "PUT"]
    with pytest.raises(UploadFailed, match="has lost the upload"):
        send(Store(cuts={1: 3}, forgets=True), Once(DATA))


def test_a_registry_that_always_forgets_uploads() -> None:
    store = Store(cuts=dict.fromkeys(range(100), 3), forgets=True)
    with pytest.raises(RemoteError, match=r"connection (cut|lost).*, 3 times|forgotten.*3 times"):
        send(store, io.BytesIO(DATA))
    assert store.blobs == {}


@pytest.mark.parametrize("status", [413, 416])
def test_a_registry_with_a_maximum_piece_size(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "SMALLEST_PIECE", 1)
    store = Store(most=4, too_large=status)
    with FakeRegistry(store.answer) as fake:
        repository = fake.repository(chunk=16)
        repository.put_blob(BLOB, Once(DATA))
        assert store.blobs == {BLOB.digest: DATA}
        assert {len(body) for _, _, body in store.pieces} == {4}
        asked = len(fake.log)
        other = Descriptor(media_type="", digest=sha256_digest(DATA[::-1]), size=len(DATA))
        repository.put_blob(other, Once(DATA[::-1]))  # it has learned
        assert len(fake.log) - asked == 7


def test_a_registry_with_a_minimum_piece_size() -> None:
    store = Store(least=12)
    send(store, Once(DATA), piece=4)
    assert [len(body) for _, _, body in store.pieces] == [12, 8]
    with pytest.raises(RemoteError, match="requires pieces of at least 99999999999 bytes"):
        send(Store(least=99_999_999_999), Once(DATA))


def test_malformed_numbers() -> None:
    store = Store(least=int("9" * 4000), range_end="9" * 5000, cuts={1: 3})
    with pytest.raises(UploadFailed, match="has lost the upload"):
        send(store, Once(DATA))


def test_a_201_response_with_an_old_range() -> None:
    """ECR does: bytes are stored, and the range stays as it was."""
    store = Store(patched=201, stale_range=True)
    send(store, Once(DATA))
    assert store.blobs == {BLOB.digest: DATA}


def test_an_upload_of_wrong_bytes_is_cancelled() -> None:
    store = Store()
    for data in (DATA[:-1], DATA + b"!", DATA[:-1] + b"!", b""):
        with pytest.raises(RemoteError, match="nothing was stored"):
            send(store, Once(data))
    assert store.sessions == {}
    assert store.blobs == {}


@pytest.mark.parametrize(
    ("headers", "match"),
    [
        ({}, "an upload was started, but its address is missing"),
        ({"Location": "ftp://x/y"}, "an upload to 'ftp' is refused"),
    ],
)
def test_an_invalid_upload_location(headers: dict[str, str], match: str) -> None:
    replies = (Reply(404), Reply(202, headers=headers))
    with serve(*replies) as fake, pytest.raises(RemoteError, match=match):
        fake.repository().put_blob(BLOB, Once(DATA))


def test_an_upload_never_moves_from_https_to_http() -> None:
    answer = requests.Response()
    answer.headers["Location"] = "http://ghcr.io/v2/x"
    repository = FakeRegistry(lambda _request: Reply()).repository()
    url = "https://ghcr.io:443/v2/a/blobs/uploads/"
    address = uploads.session_address(repository, url, answer)
    assert address == "https://ghcr.io:443/v2/x"
    answer.headers["Location"] = "http://evil.example/v2/x"
    with pytest.raises(RemoteError, match="an upload over plain http is refused"):
        uploads.session_address(repository, url, answer)


def test_an_upload_to_another_host_has_no_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    with FakeRegistry(store.answer) as other:

        def answer(request: Request) -> Reply:
            if "Authorization" not in request.headers:
                return Reply(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            if request.method == "HEAD":
                return Reply(404)
            store.sessions["0"] = b""
            return Reply(202, headers={"Location": f"{other.url}/v2/a/b/blobs/uploads/0"})

        with FakeRegistry(answer) as fake:
            monkeypatch.setenv("SPARK_BUILD_REGISTRY", fake.address)
            monkeypatch.setenv("SPARK_BUILD_REGISTRY_USER", "me")
            monkeypatch.setenv("SPARK_BUILD_REGISTRY_PASSWORD", "secret")
            fake.repository(chunk=100).put_blob(BLOB, Once(DATA))
    assert store.blobs == {BLOB.digest: DATA}
    assert all("Authorization" not in request.headers for request in other.log)


# --- mounts ---------------------------------------------------------------------------------


def test_a_refused_mount_becomes_an_upload() -> None:
    store = Store()
    with FakeRegistry(store.answer) as fake:
        target = fake.repository("a/b", chunk=100)
        source = target.registry.repository("c/d")
        assert not target.mount(BLOB, source)
        target.put_blob(BLOB, Once(DATA))
    assert [request.method for request in fake.log] == ["POST", "PUT"]
    assert parse_qs(urlsplit(fake.log[0].path).query) == {"mount": [BLOB.digest], "from": ["c/d"]}


@pytest.mark.parametrize(
    ("status", "mounted"),
    [(201, True), (400, False), (404, False), (405, False), (403, False), (501, False)],
)
def test_responses_to_a_mount(status: int, mounted: bool) -> None:
    with serve(Reply(status)) as fake:
        target = fake.repository()
        assert target.mount(BLOB, target.registry.repository("c/d")) is mounted


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_permanently_refused_mount_becomes_an_upload(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next blobs of the same repository are not tried again."""
    store = Store()

    def answer(request: Request) -> Reply:
        return Reply(status) if "mount=" in request.path else store.answer(request)

    with FakeRegistry(answer) as fake:
        target = fake.repository("a/b", chunk=100)
        source = target.registry.repository("c/d")
        assert not target.mount(BLOB, source)
        tries = len(fake.log)
        assert tries == QUICK.attempts
        assert not target.mount(BLOB, source)
        assert len(fake.log) == tries
        assert not target.mount(BLOB, target.registry.repository("e/f"))
        assert len(fake.log) == 2 * tries
        target.put_blob(BLOB, Once(DATA))
    assert store.blobs == {BLOB.digest: DATA}
    assert f"answers {status} to a blob mount from c/d; uploading" in capsys.readouterr().err


def test_a_mount_that_succeeds_after_retries() -> None:
    with serve(Reply(500), Reply(502), Reply(201)) as fake:
        target = fake.repository()
        assert target.mount(BLOB, target.registry.repository("c/d"))
        assert len(fake.log) == 3


def test_a_busy_registry_is_retried_instead_of_uploading() -> None:
    with serve(Reply(429)) as fake:
        target = fake.repository()
        with pytest.raises(RemoteError, match="answered 429, 3 times"):
            target.mount(BLOB, target.registry.repository("c/d"))


def test_nothing_is_mounted_from_elsewhere() -> None:
    with serve(Reply(201)) as fake, serve(Reply(201)) as other:
        assert not fake.repository().mount(BLOB, other.repository())
        assert fake.log == []


# --- manifests ------------------------------------------------------------------------------


def test_a_manifest_stored_under_another_digest_is_sent_again() -> None:
    made = RawManifest(data=manifest(), media_type=OCI_MANIFEST)
    wrong = Reply(201, headers={"Docker-Content-Digest": BLOB.digest})
    with serve(wrong, Reply(201, headers={"Docker-Content-Digest": made.digest})) as fake:
        fake.repository().put_manifest(made, "v1")
    assert [request.body for request in fake.log] == [made.data] * 2
    assert fake.log[0].headers["Content-Type"] == OCI_MANIFEST
    with serve(wrong) as fake, pytest.raises(RemoteError, match=r"was stored as .*, 3 times"):
        fake.repository().put_manifest(made, "v1")


def test_a_manifest_that_is_refused() -> None:
    words = json.dumps({"errors": [{"code": "MANIFEST_BLOB_UNKNOWN", "message": "no blob"}]})
    made = RawManifest(data=manifest(), media_type=OCI_MANIFEST)
    match = r"push of a/b:v1: answered 404 \(MANIFEST_BLOB"
    with serve(Reply(404, words.encode())) as fake, pytest.raises(RemoteError, match=match):
        fake.repository().put_manifest(made, "v1")


def test_a_registry_that_does_not_delete() -> None:
    with serve(Reply(405)) as fake:
        assert not Repository(fake.repository().registry, "a/b").remove("v1")


def test_an_attachment_without_a_subject_is_refused() -> None:
    made = RawManifest(data=manifest(), media_type=OCI_MANIFEST)
    with serve(Reply()) as fake, pytest.raises(RemoteError, match="subject of"):
        fake.repository().attach(made)
    assert fake.log == []
