"""Tags: what they are made of, which never move, and which hold attachments."""

from __future__ import annotations

import json

import pytest

from builder.errors import UsageError
from builder.images.engines.baked import LABEL_PREFIX
from builder.images.engines.buildkit import folder_of
from builder.images.registry.model import OCI_INDEX, OCI_MANIFEST, RawManifest
from builder.publishing.naming import check_moving
from builder.publishing.repository import (
    holds_signatures,
    is_fallback_tag,
    lists_referrers,
    parse_target,
    subject_of_tag,
)
from builder.publishing.subject import name_of
from builder.publishing.tags import our_layer

PLAN = "sha256:" + "ab" * 32


def labels(**changes: str) -> dict[str, str]:
    """Labels of an image of ours."""
    values = {"plan": PLAN, "profiles": "b12x-full", "version": "0.20.1", "title": "b12x-full"}
    values |= changes
    return {
        f"{LABEL_PREFIX}.plan": values["plan"],
        f"{LABEL_PREFIX}.profiles": values["profiles"],
        "org.opencontainers.image.version": values["version"],
        "org.opencontainers.image.title": f"spark-build {values['title']}",
    }


@pytest.mark.parametrize(
    ("changes", "tag"),
    [
        ({}, "0.20.1-b12x-full-abababababab"),
        ({"version": "0.27.1rc1+cu130"}, "0.27.1rc1-cu130-b12x-full-abababababab"),
        ({"profiles": "b12x-full,marlin"}, "0.20.1-b12x-full-marlin-abababababab"),
        ({"profiles": "", "title": "one-two"}, "0.20.1-one-two-abababababab"),
        ({"version": ""}, "unknown-b12x-full-abababababab"),
    ],
)
def test_immutable_tag(changes: dict[str, str], tag: str) -> None:
    name = name_of([labels(**changes)], "x")
    assert name.tag(verified=True) == tag
    assert name.tag(verified=False) == f"{tag}-unverified"


def test_two_plans_under_one_tag() -> None:
    other = "sha256:" + "cd" * 32
    one = name_of([labels(), labels(plan=other)], "x")
    assert one == name_of([labels(plan=other), labels()], "x"), "the order does not matter"
    assert one.plan_digest not in (PLAN, other)
    assert name_of([labels(), labels()], "x").plan_digest == PLAN


@pytest.mark.parametrize("changes", [{"version": "0.21.0"}, {"profiles": "marlin"}])
def test_images_that_disagree(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="disagree"):
        name_of([labels(), labels(**changes)], "x")


def test_a_foreign_image() -> None:
    with pytest.raises(UsageError, match="not made by spark-build"):
        name_of([], "sha256:x")


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(UsageError, match="a tag may have 128"):
        name_of([labels(profiles="p" * 120)], "x").tag(verified=True)


@pytest.mark.parametrize("tag", ["latest", "0.20.1-b12x-full", "nightly_2", "v1.2-0123456789a"])
def test_moving_tags(tag: str) -> None:
    assert check_moving([tag, tag]) == (tag,)


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "a b",
        ".x",
        "latest-previous",
        "0.20.1-b12x-full-abababababab",
        "0.20.1-b12x-full-abababababab-unverified",
        "base-abababababab",
        "sha256-" + "0" * 64,
        "sha256-" + "0" * 64 + ".sig",
        "x" * 120,
    ],
)
def test_immutable_tags(tag: str) -> None:
    with pytest.raises(UsageError):
        check_moving([tag])


def test_tags_of_attachments() -> None:
    digest = "sha256:" + "ef" * 32
    for end in ("", ".sig", ".att", ".sbom"):
        tag = digest.replace(":", "-") + end
        assert is_fallback_tag(tag)
        assert subject_of_tag(tag) == digest
    assert not is_fallback_tag("sha256-short")
    assert not is_fallback_tag("sha256-" + "x" * 64)
    assert not is_fallback_tag("latest")


@pytest.mark.parametrize(
    ("layers", "signs"),
    [
        (["application/vnd.dev.cosign.simplesigning.v1+json"], True),
        (["application/vnd.dsse.envelope.v1+json"] * 2, True),
        (["application/vnd.oci.image.layer.v1.tar+gzip"], False),
        (["application/vnd.dsse.envelope.v1+json", "application/octet-stream"], False),
        ([], False),
    ],
)
def test_a_signature_is_recognised_by_its_layers(layers: list[str], signs: bool) -> None:
    """Not by its tag: an image under such a tag is an image."""
    value = {"layers": [{"mediaType": one} for one in layers]}
    made = RawManifest(data=json.dumps(value).encode(), media_type=OCI_MANIFEST)
    assert holds_signatures(made) is signs
    assert not lists_referrers(made)


@pytest.mark.parametrize(("artifact", "lists"), [("application/x", True), (None, False)])
def test_a_list_of_attachments_is_recognised_by_its_entries(
    artifact: str | None, lists: bool
) -> None:
    entry = {"mediaType": OCI_MANIFEST, "digest": PLAN, "size": 2}
    value = {"manifests": [entry | ({"artifactType": artifact} if artifact else {})]}
    made = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    assert lists_referrers(made) is lists
    assert not holds_signatures(made)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ghcr.io/me/x", "ghcr.io/me/x"),
        ("docker://localhost:5000/x", "localhost:5000/x"),
        ("me/x", "docker.io/me/x"),
    ],
)
def test_target(text: str, name: str) -> None:
    assert parse_target(text).name == name


@pytest.mark.parametrize("text", ["ghcr.io/me/x:v1", f"ghcr.io/me/x@{PLAN}", "http://x/y", ""])
def test_invalid_targets(text: str) -> None:
    with pytest.raises(UsageError):
        parse_target(text)


@pytest.mark.parametrize(
    ("step", "ours"),
    [
        (f"COPY --link {folder_of('marlin-env')}/ / # buildkit", True),
        (f"COPY {folder_of('spark-build')}/ / # buildkit", True),
        ("COPY 01-marlin-env/ / # buildkit", True),
        ("spark-build layer marlin-env", True),
        ('RUN ["python3", "-B", "/usr/share/spark-build/spark_apply.pyz", "finish"]', True),
        ('RUN ["python3", "-B", "/usr/share/spark-build/spark_apply.py", "finish"]', True),
        ("COPY vllm /workspace/vllm # buildkit", False),
        ("RUN /bin/sh -c pip install vllm # buildkit", False),
    ],
)
def test_our_layers_are_recognised_by_their_history(step: str, ours: bool) -> None:
    assert our_layer(step) is ours
