"""The registry of one image: whole and in parts, nothing else, and never with wrong bytes."""

from __future__ import annotations

import hashlib
import socket
from typing import TYPE_CHECKING

import pytest
import requests

from builder.errors import UsageError
from builder.images.registry.layout import LayoutDirectory
from builder.publishing.distribute import Endpoint, Node, _parse_survey
from builder.publishing.subject import ImageSet, read_subject
from tests.unit.imagefiles import put_index, put_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ABSENT = "sha256:" + "0" * 64


@pytest.fixture
def subject(tmp_path: Path) -> ImageSet:
    """An index of two images in a layout."""
    parts = {name: put_vllm(tmp_path / "out", architecture=name) for name in ("arm64", "amd64")}
    put_index(tmp_path / "out", parts, "v1")
    return read_subject(LayoutDirectory(tmp_path / "out"), "v1")


@pytest.fixture
def endpoint(subject: ImageSet, tmp_path: Path) -> Iterator[Endpoint]:
    with Endpoint(LayoutDirectory(tmp_path / "out"), subject) as running:
        yield running


def get(endpoint: Endpoint, path: str, **headers: str) -> requests.Response:
    address = f"http://127.0.0.1:{endpoint.port}/v2/{path}"
    return requests.get(address, headers=headers, timeout=600)


def test_manifests_and_blobs(endpoint: Endpoint, subject: ImageSet) -> None:
    repository = endpoint.repository()
    assert get(endpoint, "").status_code == 200
    for manifest in (subject.root, *(image.manifest for image in subject.images)):
        answer = get(endpoint, f"{repository}/manifests/{manifest.digest}")
        assert answer.content == manifest.data
        assert answer.headers["Content-Type"] == manifest.media_type
        assert answer.headers["Docker-Content-Digest"] == manifest.digest
    for blob in subject.blobs():
        answer = get(endpoint, f"{repository}/blobs/{blob.digest}")
        assert f"sha256:{hashlib.sha256(answer.content).hexdigest()}" == blob.digest
        head = requests.head(answer.url, timeout=600)
        assert int(head.headers["Content-Length"]) == blob.size
        assert head.content == b""
    sent = endpoint.counted(repository)
    assert sent.blobs == len(subject.blobs())
    assert sent.bytes == sum(blob.size for blob in subject.blobs())


@pytest.mark.parametrize(
    ("asked", "start", "stop"), [("bytes=10-", 10, None), ("bytes=10-19", 10, 20)]
)
def test_ranges_resume_a_download(
    endpoint: Endpoint, subject: ImageSet, asked: str, start: int, stop: int | None
) -> None:
    repository, blob = endpoint.repository(), subject.blobs()[0]
    whole = get(endpoint, f"{repository}/blobs/{blob.digest}").content
    part = get(endpoint, f"{repository}/blobs/{blob.digest}", Range=asked)
    assert part.status_code == 206
    assert part.content == whole[start:stop]
    end = (stop or blob.size) - 1
    assert part.headers["Content-Range"] == f"bytes {start}-{end}/{blob.size}"
    beyond = get(endpoint, f"{repository}/blobs/{blob.digest}", Range=f"bytes={blob.size}-")
    assert beyond.status_code == 416


def test_nothing_else_is_served(endpoint: Endpoint, subject: ImageSet) -> None:
    repository = endpoint.repository()
    other = "f" * 32 + "/image"
    for path in (
        f"{other}/manifests/{subject.digest}",
        f"{repository}/manifests/{ABSENT}",
        f"{repository}/manifests/latest",
        f"{repository}/blobs/{ABSENT}",
        f"{repository}/blobs/{subject.digest}",
        f"{repository}/../blobs/{subject.digest}",
        "../../etc/passwd",
        f"{repository}/tags/list",
    ):
        assert get(endpoint, path).status_code == 404, path
    address = f"http://127.0.0.1:{endpoint.port}/v2/{repository}/blobs/uploads/"
    assert requests.post(address, timeout=600).status_code == 501


def test_a_tls_client_gets_a_clear_error(endpoint: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as line:
        line.sendall(b"\x16\x03\x01\x00\x05hello")
        assert line.recv(100).startswith(b"HTTP/1.0 400")


def test_a_damaged_blob_is_cut_off_and_reported(
    endpoint: Endpoint, subject: ImageSet, tmp_path: Path
) -> None:
    blob = subject.blobs()[0]
    file = tmp_path / "out" / "blobs" / "sha256" / blob.digest.removeprefix("sha256:")
    file.write_bytes(b"x" * blob.size)
    with pytest.raises(requests.RequestException):
        _ = get(endpoint, f"{endpoint.repository()}/blobs/{blob.digest}").content
    assert blob.digest in endpoint.problems[0]


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "", "a b", "a;b", "$(x)", "a\nb"])
def test_invalid_hosts(host: str) -> None:
    with pytest.raises(UsageError):
        Node.parse(host, "ssh")


@pytest.mark.parametrize("host", ["spark-1", "me@spark-1.local", "10.0.0.7", "me@[fe80::1%eth0]"])
def test_hosts(host: str) -> None:
    assert Node.parse(host, "ssh -p 22 -F 'a b'").ssh == ("ssh", "-p", "22", "-F", "a b")


def test_survey_of_a_node() -> None:
    said = 'arch arm64\nfree 1024\n["sha256:a","sha256:b"]\nnull\nodd\n["sha256:b"]\n'
    survey = _parse_survey(said)
    assert survey.architecture == "arm64"
    assert survey.layers == {"sha256:a", "sha256:b"}
    assert survey.free == 1024 * 1024
    assert _parse_survey("").layers == frozenset()


@pytest.mark.parametrize(
    "line",
    [
        "[" * 10_000 + "]" * 10_000,
        '{"a": ' * 200 + "1" + "}" * 200,
        "free \u00b2",
        "free " + "9" * 5000,
    ],
)
def test_an_odd_line_of_a_node_is_skipped(line: str) -> None:
    survey = _parse_survey(f'arch arm64\n{line}\n["sha256:a"]\n')
    assert (survey.architecture, survey.free) == ("arm64", 0)
    assert survey.layers == {"sha256:a"}
