"""What a person named is read in one place."""

from __future__ import annotations

import pytest

from builder.common.reference import Ref

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("text", "scheme", "place", "kind", "in_registry"),
    [
        ("vllm/vllm-openai:v1", "docker", "vllm/vllm-openai:v1", "image", False),
        ("docker://host.test/a:v1", "docker", "host.test/a:v1", "image", True),
        ("docker:24", "docker", "docker:24", "image", False),
        ("oci:out:name", "oci", "out:name", "image", False),
        ("pypi:vllm==0.20.1", "pypi", "vllm==0.20.1", "pypi", False),
        ("dir:/opt/venv", "dir", "/opt/venv", "dir", False),
        ("ppyi:vllm==0.20.1", "docker", "ppyi:vllm==0.20.1", "image", False),
        ("", "docker", "", "image", False),
    ],
)
def test_the_parts_of_a_reference(
    text: str, scheme: str, place: str, kind: str, in_registry: bool
) -> None:
    ref = Ref(text)
    assert (ref.scheme, ref.place, ref.kind.name, ref.in_registry) == (
        scheme, place, kind, in_registry,
    )  # fmt: skip
    assert ref.in_layout == (scheme == "oci")
    assert str(ref) == text


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (f"host.test/a@{DIGEST}", DIGEST),
        (f"host.test/a:v1@{DIGEST}", DIGEST),
        (f"oci:out@{DIGEST}", DIGEST),
        ("host.test/a:v1", ""),
        ("host.test/a@sha256:short", ""),
    ],
)
def test_only_a_whole_digest_pins(text: str, digest: str) -> None:
    assert Ref(text).digest == digest
