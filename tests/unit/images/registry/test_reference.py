"""Image references: the same words that Docker takes, the same that it refuses."""

from __future__ import annotations

import pytest

from builder.errors import UsageError
from builder.images.registry.reference import check_tag, is_loopback, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "host", "repository", "tag", "digest"),
    [
        ("debian", "docker.io", "library/debian", "latest", ""),
        ("debian:13", "docker.io", "library/debian", "13", ""),
        ("vllm/vllm-openai:v0.20.1", "docker.io", "vllm/vllm-openai", "v0.20.1", ""),
        ("docker://vllm/vllm-openai", "docker.io", "vllm/vllm-openai", "latest", ""),
        ("index.docker.io/a/b", "docker.io", "a/b", "latest", ""),
        ("docker.io/debian", "docker.io", "library/debian", "latest", ""),
        ("ghcr.io/a/b/c:x", "ghcr.io", "a/b/c", "x", ""),
        ("localhost/a", "localhost", "a", "latest", ""),
        ("localhost:5000/a", "localhost:5000", "a", "latest", ""),
        ("127.0.0.1:5000/a/b:1", "127.0.0.1:5000", "a/b", "1", ""),
        ("[::1]:5000/a", "[::1]:5000", "a", "latest", ""),
        ("Registry/a", "Registry", "a", "latest", ""),
        (f"ghcr.io/a/b@{DIGEST}", "ghcr.io", "a/b", "", DIGEST),
        (f"ghcr.io/a/b:x@{DIGEST}", "ghcr.io", "a/b", "x", DIGEST),
        ("a__b/c--d/e.f:g_H-1.", "docker.io", "a__b/c--d/e.f", "g_H-1.", ""),
    ],
)
def test_valid_references(text: str, host: str, repository: str, tag: str, digest: str) -> None:
    found = parse_reference(text)
    assert (found.host, found.repository, found.tag, found.digest) == (
        host,
        repository,
        tag,
        digest,
    )
    assert found.identifier == (digest or tag)
    assert parse_reference(str(found)) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the format is"),
        (" debian", "the format is"),
        ("https://ghcr.io/a", "the format is"),
        ("Debian", "must be lower case"),
        ("ghcr.io/A/b", "must be lower case"),
        ("a//b", "'' is not valid in a repository name"),
        ("a/b/", "'' is not valid in a repository name"),
        ("ghcr.io/", "'' is not valid in a repository name"),
        ("a/../b", "'..' is not valid in a repository name"),
        ("a/-b", "'-b' is not valid in a repository name"),
        ("a___b", "'a___b' is not valid in a repository name"),
        ("a:", "'' is not a tag"),
        ("a:-x", "'-x' is not a tag"),
        ("a:b:c", "'b:c' is not a tag"),
        ("a:" + "x" * 129, "is not a tag"),
        ("a b:c", "'a b' is not valid in a repository name"),
        ("host:99999/a", "99999 is not a port"),
        ("ho_st.example/a", "is not a host"),
        ("user@host.example/a", "'@' must be followed"),
        ("a@sha256:0123", "'@' must be followed"),
        (f"a@{DIGEST.upper()}", "'@' must be followed"),
        (f"a@{DIGEST}x", "'@' must be followed"),
        ("a@sha512:" + "0" * 128, "'@' must be followed"),
        ("0" * 64, "an image ID"),
        ("ghcr.io/" + "a" * 250, "longer than 255"),
        ("a\n", "the format is"),
        ("a/b?c=d", "is not valid in a repository name"),
    ],
)
def test_invalid_references(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert why in str(caught.value)
    assert caught.value.hint


def test_equivalent_references() -> None:
    found = parse_reference("debian:13")
    assert found.api_host == "registry-1.docker.io"
    assert str(found.at(DIGEST)) == f"docker.io/library/debian:13@{DIGEST}"
    assert str(found.at(DIGEST).tagged("14")) == "docker.io/library/debian:14"
    assert parse_reference("ghcr.io/a/b").api_host == "ghcr.io"
    with pytest.raises(UsageError, match="is not a tag"):
        check_tag("a/b")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("127.9.9.9", True),
        ("[::1]:5000", True),
        ("[::1]", True),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("10.0.0.1:5000", False),
        ("[fe80::1]:5000", False),
    ],
)
def test_local_hosts(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
