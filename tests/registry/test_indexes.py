"""``publish`` of an index: whatever a runtime may choose from it is proven, or it is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import OCI_CONFIG, OCI_INDEX, OCI_MANIFEST, RawManifest
from builder.publishing.subject import read_subject

from . import images, overlays, servers
from .test_publish import _quick, memory, publish  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.memoryregistry import MemoryRegistry

ARM = {"os": "linux", "architecture": "arm64"}
NOWHERE = {"os": "unknown", "architecture": "unknown"}
MARK = {
    "vnd.docker.reference.type": "attestation-manifest",
    "vnd.docker.reference.digest": "sha256:" + "0" * 64,
}


@pytest.fixture
def ours(tmp_path: Path) -> tuple[LayoutDirectory, dict[str, Any]]:
    """A layout with an image of ours, and its entry in an index; evidence is beside it."""
    overlays.build(tmp_path / "out")
    layout = LayoutDirectory(tmp_path / "out")
    (image,) = read_subject(layout, "").images
    return layout, images.entry(image.manifest, "arm64")


def put_index(layout: LayoutDirectory, *entries: dict[str, Any]) -> str:
    """An index as the only image of a layout, and evidence for what is ours in it."""
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    made = RawManifest(data=images.document(value), media_type=OCI_INDEX)
    (layout.path / "index.json").unlink()
    layout.put_manifest(made, "v1")
    rows = [overlays.report(entry["digest"], overlays.make_plan().digest) for entry in entries[:1]]
    layout.path.with_suffix(".evidence.json").write_text(json.dumps(rows))
    return made.digest


def foreign(layout: LayoutDirectory, architecture: str = "arm64", **more: Any) -> dict[str, Any]:
    """Somebody else's image, and its entry."""
    made = images.add_image(layout, "foreign", architecture=architecture)
    return {**images.entry(made, architecture), **more}


def statement(layout: LayoutDirectory) -> dict[str, Any]:
    """What BuildKit attaches to an image."""
    document = {"architecture": "unknown", "os": "unknown", "config": {},
                "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "1" * 64]}}  # fmt: skip
    blob = images.put(layout, b'{"_type": "x"}', "application/vnd.in-toto+json")
    data = images.document(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": images.put(layout, images.document(document), OCI_CONFIG).as_json(),
            "layers": [blob.as_json()],
        }
    )
    made = RawManifest(data=data, media_type=OCI_MANIFEST)
    layout.put_manifest(made, made.digest)
    return {**made.descriptor.as_json(), "platform": NOWHERE, "annotations": MARK}


def without_platform(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "platform"}


@pytest.mark.parametrize(
    "beside",
    [
        foreign,
        lambda layout: foreign(layout, platform={**ARM, "variant": "v8"}),
        lambda layout: foreign(layout, "amd64"),
        lambda layout: foreign(layout, "s390x"),
        lambda layout: without_platform(foreign(layout)),
        lambda layout: foreign(layout, annotations=MARK),
        lambda layout: foreign(layout, "unknown", platform=NOWHERE, annotations=MARK),
        lambda layout: {**statement(layout), "platform": ARM},
        lambda layout: {**statement(layout), "annotations": {}},
    ],
    ids=[
        "arm64",
        "v8",
        "amd64",
        "s390x",
        "nameless",
        "marked",
        "disguised",
        "for arm64",
        "no mark",
    ],
)
def test_an_index_with_a_foreign_image_is_refused(
    memory: MemoryRegistry,  # noqa: F811
    ours: tuple[LayoutDirectory, dict[str, Any]],
    beside: Callable[[LayoutDirectory], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, entry = ours
    other = beside(layout)
    put_index(layout, entry, other)
    where = f"{memory.address}/x/y"
    words = ("--to", where, "--move-tag", "latest", "--overlay", "--evidence")
    evidence = str(layout.path.with_suffix(".evidence.json"))
    assert run(["publish", f"oci:{layout.path}", *words, evidence]) in (5, 8)
    said = capsys.readouterr().err
    assert other["digest"] in said
    assert not memory.manifests
    assert run(["publish", f"oci:{layout.path}", *words[:2], "--overlay", "--force"]) in (5, 8)
    assert not memory.manifests


def test_the_command_in_the_refusal_publishes_the_image(
    memory: MemoryRegistry,  # noqa: F811
    ours: tuple[LayoutDirectory, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, entry = ours
    put_index(layout, entry, foreign(layout, "amd64"))
    where = f"{memory.address}/x/y"
    evidence = str(layout.path.with_suffix(".evidence.json"))
    assert run(["publish", f"oci:{layout.path}", "--to", where, "--overlay"]) == 5
    hint = capsys.readouterr().err.partition("try: spark-build ")[2].split("\n")[0].split()
    assert hint == ["publish", f"oci:{layout.path}@{entry['digest']}", "--to", where]
    assert run([*hint, "--overlay", "--evidence", evidence]) == 0


def test_attestations_are_published_with_their_image(
    memory: MemoryRegistry,  # noqa: F811
    ours: tuple[LayoutDirectory, dict[str, Any]],
) -> None:
    layout, entry = ours
    digest = put_index(layout, entry, statement(layout))
    assert publish(layout.path, "--to", f"{memory.address}/x/y", "--move-tag", "latest") == 0
    assert memory.tag("x/y", "latest") == digest


@pytest.mark.parametrize("stated", ["amd64", "s390x"])
def test_an_entry_for_another_platform_than_its_image(
    memory: MemoryRegistry,  # noqa: F811
    ours: tuple[LayoutDirectory, dict[str, Any]],
    stated: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, entry = ours
    put_index(layout, {**entry, "platform": {"os": "linux", "architecture": stated}})
    evidence = str(layout.path.with_suffix(".evidence.json"))
    words = ("--to", f"{memory.address}/x/y", "--overlay", "--evidence", evidence)
    assert run(["publish", f"oci:{layout.path}", *words]) == 8
    assert f"for linux/{stated}, but its configuration is for linux/arm64" in (
        capsys.readouterr().err
    )
    assert not memory.manifests


# ------------------------------------------------------------------------------------------- verify


@pytest.fixture
def patched(
    registry: servers.DockerRegistry, tmp_path: Path
) -> tuple[LayoutDirectory, dict[str, Any]]:
    """A patched image in a layout, and its entry in an index."""
    base = overlays.put_base(tmp_path / "base", f"{registry.address}/index-base/vllm:v1")
    overlays.build_on(base, tmp_path / "whole", thin=False)
    layout = LayoutDirectory(tmp_path / "whole")
    (image,) = read_subject(layout, "").images
    return layout, images.entry(image.manifest, "arm64")


def verify(layout: LayoutDirectory, *words: str) -> int:
    return run(["verify", f"oci:{layout.path}", "--level", "static,imports", *words])


@pytest.mark.parametrize("asked", [(), ("--platform", "linux/arm64")], ids=["any", "arm64"])
def test_verify_of_an_index_with_a_foreign_image_for_the_same_platform(
    patched: tuple[LayoutDirectory, dict[str, Any]],
    asked: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, entry = patched
    other = foreign(layout, platform={**ARM, "variant": "v8"})
    put_index(layout, entry, other)
    assert verify(layout, *asked) == 8
    said = capsys.readouterr()
    assert other["digest"] in said.err
    assert "Proven" not in said.out + said.err


def test_verify_of_an_index_with_a_foreign_image_for_other_machines(
    patched: tuple[LayoutDirectory, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It must be said what is meant: the image for one platform, not all that the name gives."""
    layout, entry = patched
    other = foreign(layout, "amd64")
    put_index(layout, entry, other, statement(layout))
    assert verify(layout) == 2
    said = capsys.readouterr()
    assert other["digest"] in said.err
    assert "--platform linux/arm64" in said.err
    assert "Proven" not in said.out + said.err
    assert verify(layout, "--platform", "linux/arm64") == 0
    put_index(layout, entry, statement(layout))
    assert verify(layout) == 0


@pytest.mark.parametrize("stated", ["amd64", "s390x"])
def test_verify_and_plan_of_an_entry_for_another_platform(
    patched: tuple[LayoutDirectory, dict[str, Any]],
    stated: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, entry = patched
    put_index(layout, {**entry, "platform": {"os": "linux", "architecture": stated}})
    assert verify(layout) == 8
    assert run(["plan", "--layers", "marlin", "--base", f"oci:{layout.path}"]) == 8
    said = capsys.readouterr().err
    assert said.count(f"for linux/{stated}, but its configuration is for linux/arm64") == 2
