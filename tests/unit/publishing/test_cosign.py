"""What cosign prints is counted only where it is about this image."""

from __future__ import annotations

import json

import pytest

from builder.errors import RemoteError, SparkBuildError
from builder.images.registry.reference import parse_reference
from builder.publishing.cosign import _count

DIGEST = "sha256:" + "a" * 64
IMAGE = parse_reference(f"registry.example/x@{DIGEST}")


def payload(digest: str) -> dict[str, object]:
    return {"critical": {"image": {"docker-manifest-digest": digest}}}


def test_signatures_are_counted() -> None:
    assert _count(json.dumps([payload(DIGEST)] * 2), IMAGE) == 2


@pytest.mark.parametrize(
    "output",
    ["", "x", "{}", "[1]", "null", "[{}]", "[" * 10_000 + "]" * 10_000, "[" * 150 + "]" * 150],
)
def test_an_answer_that_is_none(output: str) -> None:
    with pytest.raises((RemoteError, SparkBuildError), match=r"cannot be parsed|of nothing"):
        _count(output, IMAGE)


def test_a_signature_of_another_image() -> None:
    with pytest.raises(SparkBuildError, match="a signature of sha256:b"):
        _count(json.dumps([payload("sha256:" + "b" * 64)]), IMAGE)
