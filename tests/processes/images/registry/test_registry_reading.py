"""Reading from registries that lie, break off, or lead astray."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import RemoteError
from builder.images.registry.client import Repository
from builder.images.registry.model import (
    DOCKER_INDEX,
    MANIFEST_LIMIT,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    sha256_digest,
)
from tests.unit.fakeregistry import FakeRegistry, Reply, Request, manifest, serve

if TYPE_CHECKING:
    from pathlib import Path

TYPED = {"Content-Type": OCI_MANIFEST}
DATA = bytes(range(256)) * 40
BLOB = Descriptor(media_type="", digest=sha256_digest(DATA), size=len(DATA))


def refused(reply: Reply, match: str, reference: str = "v1") -> None:
    with serve(reply) as fake, pytest.raises(RemoteError, match=match) as caught:
        fake.repository().manifest(reference)
    assert caught.value.code == 8


# --- manifests ------------------------------------------------------------------------------


def test_a_manifest() -> None:
    data = manifest()
    typed = {"Content-Type": f"{OCI_MANIFEST}; charset=utf-8"}
    with serve(Reply(body=data, headers=typed)) as fake:
        found = fake.repository().manifest("v1")
    assert (found.data, found.media_type, found.digest) == (data, OCI_MANIFEST, sha256_digest(data))
    (request,) = fake.log
    assert request.path == "/v2/a/b/manifests/v1"
    assert DOCKER_INDEX in request.headers["Accept"]
    assert "Authorization" not in request.headers


@pytest.mark.parametrize("length", [None, -1], ids=["announced", "unannounced"])
def test_a_manifest_that_is_too_large(length: int | None) -> None:
    body = b" " * (MANIFEST_LIMIT + 1)
    refused(
        Reply(body=body, headers=TYPED, length=length), "larger than the limit of 4194304 bytes"
    )


def test_a_manifest_with_a_wrong_digest() -> None:
    other = sha256_digest(b"other")
    refused(Reply(body=manifest(), headers=TYPED), f"the data received for {other} is", other)
    named = {**TYPED, "Docker-Content-Digest": other}
    refused(Reply(body=manifest(), headers=named), f"the data received for {other} is")


@pytest.mark.parametrize(
    ("body", "headers", "match"),
    [
        (manifest(), {"Content-Type": "text/html"}, "is of type 'text/html'"),
        (manifest(mediaType=None), {"Content-Type": ""}, "has its parts|is of type"),
        (b"<html>", TYPED, "is not JSON"),
        (b"[1]", TYPED, "is not a JSON object"),
        (b"\xff\xfe", TYPED, "is not JSON"),
        (b"[" * 100_000, TYPED, "is not JSON"),
        (manifest(mediaType=OCI_INDEX), TYPED, "was sent as .* but states .*index"),
        (manifest(manifests=[]), TYPED, "lacks its required fields"),
        (manifest(config=None, layers=None), TYPED, "lacks its required fields"),
        (
            manifest(mediaType=OCI_INDEX, manifests=[]),
            {"Content-Type": OCI_INDEX},
            "lacks its required fields",
        ),
        (
            b"{}",
            {"Content-Type": "application/vnd.docker.distribution.manifest.v1+prettyjws"},
            "obsolete first form",
        ),
    ],
)
def test_malformed_manifests(body: bytes, headers: dict[str, str], match: str) -> None:
    if not headers["Content-Type"]:
        headers = {"Content-Type": "application/octet-stream"}
        match = "is of type 'application/octet-stream'"
    refused(Reply(body=body, headers=headers), match)


def test_the_error_text_of_the_registry_is_shown_sanitised() -> None:
    words = {"errors": [{"code": "DENIED", "message": "no\x1b[31m\nway " + "x" * 999}]}
    reply = Reply(403, json.dumps(words).encode())
    with serve(reply) as fake, pytest.raises(RemoteError) as caught:
        fake.repository().manifest("v1")
    text = str(caught.value)
    assert "answered 403 (DENIED: no [31m way xxx" in text
    assert len(text) < 500
    assert "\x1b" not in text
    assert caught.value.hint.startswith("docker login")


NO_WORDS = [b"<html>", b"[]", b'{"errors": 1}', b'{"errors": [1]}', b"[" * 60_000, b"x" * 99_999]


@pytest.mark.parametrize("body", NO_WORDS)
def test_empty_error_texts_are_omitted(body: bytes) -> None:
    with serve(Reply(404, body)) as fake, pytest.raises(RemoteError, match=r"answered 404$"):
        fake.repository().manifest("v1")


# --- blobs ----------------------------------------------------------------------------------


def read(fake: FakeRegistry, blob: Descriptor = BLOB, step: int = -1, **options: Any) -> bytes:
    with fake.repository(**options).open(blob) as stream:
        parts = [stream.read(step)]
        while step > 0 and parts[-1]:
            parts.append(stream.read(step))
        return b"".join(parts)


def ranged(request: Request) -> Reply:
    """As a good registry does."""
    wanted = request.headers.get("Range")
    if wanted is None:
        return Reply(body=DATA)
    start, stop = (int(text) for text in wanted.removeprefix("bytes=").split("-"))
    headers = {"Content-Range": f"bytes {start}-{stop}/{len(DATA)}"}
    return Reply(206, DATA[start : stop + 1], headers)


def test_a_blob_download_resumes() -> None:
    def answer(request: Request) -> Reply:
        whole = ranged(request)
        return Reply(whole.status, whole.body[:3000], whole.headers, len(whole.body), cut=True)

    with FakeRegistry(answer) as fake:
        # a cut each 3000 bytes, and never more than two in a row without progress
        assert read(fake, attempts=9) == DATA
    starts = [request.headers.get("Range", "").partition("-")[0] for request in fake.log]
    assert starts == ["", "bytes=3000", "bytes=6000", "bytes=9000"]


@pytest.mark.parametrize("status", [200, 416])
def test_a_registry_without_range_support(status: int) -> None:
    def answer(request: Request) -> Reply:
        if len(fake.log) == 1:
            return Reply(body=DATA[:5000], length=len(DATA), cut=True)
        if status == 416 and "Range" in request.headers:
            return Reply(416)
        return Reply(body=DATA)

    with FakeRegistry(answer) as fake:
        assert read(fake) == DATA


def test_a_response_with_another_range() -> None:
    other = {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}"}
    with (
        serve(Reply(body=DATA[:5000], length=len(DATA), cut=True), Reply(206, DATA, other)) as fake,
        pytest.raises(RemoteError, match="from byte 5000 on, got other bytes"),
    ):
        read(fake)


@pytest.mark.parametrize("step", [-1, 1000, len(DATA)], ids=["at once", "bit by bit", "exactly"])
def test_wrong_bytes_are_always_an_error(step: int) -> None:
    wrong = DATA[:-1] + b"!"
    with (
        serve(Reply(body=wrong)) as fake,
        pytest.raises(RemoteError, match="the data received for"),
    ):
        read(fake, step=step)


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (Reply(body=DATA[:-1]), f"should have {len(DATA)} bytes and has {len(DATA) - 1}"),
        (Reply(body=DATA + b"!"), f"should have {len(DATA)} bytes and has {len(DATA) + 1}"),
        (Reply(body=DATA + b"!", length=-1), "is longer than expected"),
        (Reply(body=DATA[:-1], length=-1), r"connection cut after \d+ of \d+ bytes, 3 times"),
        (Reply(404), "answered 404"),
    ],
)
def test_a_wrong_blob_size(reply: Reply, match: str) -> None:
    with serve(reply) as fake, pytest.raises(RemoteError, match=match):
        read(fake)


def test_malformed_numbers() -> None:
    headers = {"Content-Range": f"bytes {'9' * 5000}-9/9"}
    cut = Reply(body=DATA[:5000], length=len(DATA), cut=True)
    replies = (cut, Reply(206, DATA, headers))
    with serve(*replies) as fake, pytest.raises(RemoteError, match="got other bytes"):
        read(fake)
    with serve(Reply(body=DATA, headers={"Content-Length": "9" * 5000}, length=-1)) as fake:
        assert read(fake) == DATA


def test_an_empty_blob() -> None:
    blob = Descriptor(media_type="", digest=sha256_digest(b""), size=0)
    with serve(Reply()) as fake:
        assert read(fake, blob) == b""
    lying = Descriptor(media_type="", digest=sha256_digest(b"x"), size=0)
    with serve(Reply()) as fake, pytest.raises(RemoteError, match="the data received for"):
        read(fake, lying)


def test_a_stopped_reader_downloads_no_more() -> None:
    data = bytes(8 << 20)
    blob = Descriptor(media_type="", digest=sha256_digest(b"other"), size=len(data))
    with serve(Reply(body=data)) as fake:
        repository = fake.repository()
        with repository.open(blob) as stream:
            assert stream.read(10) == bytes(10)
        assert repository.transport.traffic.received < 1 << 20


# --- redirects ------------------------------------------------------------------------------


def test_a_redirected_blob_is_read_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither our own, nor what ``~/.netrc`` would give to the other host."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_USER", "me")
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_PASSWORD", "secret")
    with serve(Reply(body=DATA)) as store:

        def answer(request: Request) -> Reply:
            if "Authorization" not in request.headers:
                return Reply(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            return Reply(307, headers={"Location": f"{store.url}/blob?signature=abc"})

        with FakeRegistry(answer) as fake:
            monkeypatch.setenv("SPARK_BUILD_REGISTRY", fake.address)
            assert read(fake) == DATA
            assert fake.log[-1].headers["Authorization"].startswith("Basic ")
    (request,) = store.log
    assert request.path == "/blob?signature=abc"
    assert "Authorization" not in request.headers
    assert "Cookie" not in request.headers


@pytest.mark.parametrize(
    ("location", "match"),
    [
        ("/v2/a/b/blobs/x", "answered 307|leads back"),
        ("file:///etc/passwd", "to 'file' is refused"),
        ("gopher://x/", "to 'gopher' is refused"),
    ],
)
def test_invalid_redirects(location: str, match: str) -> None:
    reply = Reply(307, headers={"Location": location})
    with serve(reply) as fake, pytest.raises(RemoteError, match=match):
        read(fake)


def test_endless_redirects() -> None:
    def answer(request: Request) -> Reply:
        return Reply(302, headers={"Location": f"/next/{len(fake.log)}?secret=abc"})

    with FakeRegistry(answer) as fake, pytest.raises(RemoteError, match="more than 10 redirects"):
        read(fake)
    assert len(fake.log) == 10


def test_no_redirect_leads_from_https_to_http() -> None:
    transport = FakeRegistry(lambda _request: Reply()).repository().transport
    with pytest.raises(RemoteError, match="a redirect from https to 'http' is refused"):
        transport._next("https://a.example/v2/", "http://a.example/v2/")
    assert transport._next("https://a.example/v2/", "/x") == "https://a.example/x"


# --- lists ----------------------------------------------------------------------------------


def test_tags_come_in_pages() -> None:
    def answer(request: Request) -> Reply:
        page = len(fake.log)
        link = {"Link": f'</v2/a/b/tags/list?n=2&last=t{page}>; rel="next"'} if page < 3 else {}
        return Reply(body=json.dumps({"tags": [f"t{page}", f"u{page}"]}).encode(), headers=link)

    with FakeRegistry(answer) as fake:
        assert fake.repository().tags() == ["t1", "u1", "t2", "u2", "t3", "u3"]


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (Reply(body=b"{"), "the list of tags is malformed"),
        (Reply(body=b"[]"), "the list of tags is malformed"),
        (Reply(body=b'{"tags": "abc"}'), "the list of tags is malformed"),
        (Reply(body=b'{"tags": [1]}'), "the list of tags is malformed"),
        (Reply(body=b" " * (MANIFEST_LIMIT + 1)), "larger than"),
        (
            Reply(body=b'{"tags": []}', headers={"Link": '</v2/a/b/tags/list?n=1000>; rel="next"'}),
            "never ends",
        ),
        (
            Reply(body=b'{"tags": []}', headers={"Link": '<http://evil.example/x>; rel="next"'}),
            "leads to http://evil.example/x",
        ),
    ],
)
def test_malformed_lists(reply: Reply, match: str) -> None:
    with serve(reply) as fake, pytest.raises(RemoteError, match=match):
        fake.repository().tags()


def test_an_endless_list() -> None:
    def answer(request: Request) -> Reply:
        link = {"Link": f'</v2/a/b/tags/list?last={len(fake.log)}>; rel="next"'}
        return Reply(body=b'{"tags": ["a"]}', headers=link)

    with FakeRegistry(answer) as fake, pytest.raises(RemoteError, match="never ends"):
        fake.repository().tags()
    assert len(fake.log) <= 201


def test_a_repository_without_tags() -> None:
    with serve(Reply(body=b'{"name": "a/b", "tags": null}')) as fake:
        assert fake.repository().tags() == []


def test_malformed_referrers() -> None:
    reply = Reply(body=manifest(), headers=TYPED)
    with serve(reply) as fake, pytest.raises(RemoteError, match="has no list of parts"):
        fake.repository().referrers(BLOB.digest)


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../../evil", "a/../b", "a?x=1", "a#b", "", ".", "-a", "a b", "a%2f", "ä", "x" * 129]
)
def test_an_invalid_tag_is_never_sent(name: str) -> None:
    listed = Reply(200, json.dumps({"tags": ["ok", name]}).encode())
    with serve(listed) as fake:
        repository = Repository(fake.repository().registry, "a/b")
        for asking in (repository.manifest, repository.digest_of, repository.remove):
            with pytest.raises(RemoteError, match="is neither a tag nor a digest"):
                asking(name)
        with pytest.raises(RemoteError, match="is not a sha256 digest"):
            repository.has(name)
        with pytest.raises(RemoteError, match="is not a sha256 digest"):
            repository.referrers(name)
        assert not fake.log
        with pytest.raises(RemoteError, match="its list of tags has "):
            repository.tags()


@pytest.mark.parametrize("name", ["../evil", "a/../b", "A/b", "a//b", "", "a/", "a?b", "x" * 300])
def test_an_invalid_repository_name(name: str) -> None:
    with serve(Reply(200)) as fake, pytest.raises(RemoteError, match="is not a repository name"):
        fake.repository(name)
