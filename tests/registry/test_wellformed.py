"""The validators of images: each finds what is wrong, and nothing in what we write."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.images.registry.model import OCI_MANIFEST
from builder.pipeline import publish as command
from tests.engine import cache
from tests.unit.imagefiles import put_vllm

from . import images, overlays, servers, wellformed
from .test_patching import IMAGE, put_base
from .test_publish import attached, files_only, publish, repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.machine import Programs, Registry
    from tests.unit.caller import Call


@pytest.fixture(scope="session", autouse=True)
def _validators() -> None:
    try:
        servers.CranePrograms().program("crane")
        wellformed._package(*wellformed.SPECIFICATION)
        wellformed._package(*wellformed.VALIDATOR)
    except cache.MachineError as error:
        pytest.skip(f"no validators: {str(error).splitlines()[0]}")


# ---------------------------------------------------------------------------------- what is wrong


def diff_id(_manifest: Any, config: Any) -> None:
    old = config["rootfs"]["diff_ids"][0]
    config["rootfs"]["diff_ids"][0] = old[:-1] + ("0" if old[-1] != "0" else "1")


def layer_size(manifest: Any, _config: Any) -> None:
    manifest["layers"][0]["size"] += 1


def layer_type(manifest: Any, _config: Any) -> None:
    manifest["layers"][0]["mediaType"] = "application/octet-stream"


def config_type(manifest: Any, _config: Any) -> None:
    manifest["config"]["mediaType"] = "text/plain"


def layers_without_diff_id(_manifest: Any, config: Any) -> None:
    config["rootfs"]["diff_ids"].pop()


def no_architecture(_manifest: Any, config: Any) -> None:
    del config["architecture"]


def annotation(manifest: Any, _config: Any) -> None:
    manifest["annotations"] = {"org.opencontainers.image.version": 1}


def spoiled(path: Path, harm: Callable[[Any, Any], None]) -> None:
    """An image that is whole in itself, but for one harm."""
    images.image(path)
    blobs = path / "blobs" / "sha256"

    def put(value: object) -> dict[str, object]:
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    index = json.loads((path / "index.json").read_bytes())
    manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    harm(manifest, config)
    manifest["config"].update(put(config))
    index["manifests"][0].update(put(manifest))
    (path / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (layer_size, "size mismatch"),
        (layer_type, "invalid descriptor MediaType"),
        (config_type, "text/plain"),
        (no_architecture, "'architecture' is a required property"),
        (annotation, "1 is not of type 'string'"),
    ],
)
def test_a_malformed_layout_is_detected(tmp_path: Path, harm: Any, said: str) -> None:
    spoiled(tmp_path / "spoiled", harm)
    with pytest.raises((wellformed.NotWellFormed, KeyError), match=said):
        wellformed.layout(tmp_path / "spoiled")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (diff_id, "SHA256"),
        (layer_size, "error verifying size"),
        (layers_without_diff_id, "mismatched fs layers"),
    ],
)
def test_a_malformed_image_in_a_registry_is_detected(
    programs: Programs, registry: Registry, tmp_path: Path, harm: Any, said: str
) -> None:
    spoiled(tmp_path / "spoiled", harm)
    name = f"{registry.address}/spoiled/{harm.__name__}:1"
    words = ("copy", "-q", "--dest-tls-verify=false", f"oci:{tmp_path}/spoiled:v1")
    servers.skopeo(programs, *words, f"docker://{name}")
    with pytest.raises(wellformed.NotWellFormed, match=said):
        wellformed.remote(name)


def test_a_damaged_layout_document_is_detected(tmp_path: Path) -> None:
    images.image(tmp_path / "x")
    assert wellformed.layout(tmp_path / "x") == 2
    (tmp_path / "x" / "oci-layout").write_text('{"imageLayoutVersion": "2"}')
    with pytest.raises(wellformed.NotWellFormed, match="oci-layout"):
        wellformed.layout(tmp_path / "x")


# ------------------------------------------------------------------------------------ what is ours


def test_a_pushed_image_is_well_formed(
    call: Call, programs: Programs, registry: Registry, tmp_path: Path
) -> None:
    base = put_base(tmp_path, registry.address, "valid/base")
    tag = f"{registry.address}/valid/pushed:1"
    assert call(*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag).code == 0
    assert wellformed.published(programs, tag, tmp_path / "back") == 2


def test_a_written_layout_is_well_formed(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "layout")
    words = ("-b", f"oci:{tmp_path}/layout", "--output", "oci:out")
    assert call(*IMAGE, *words, "--no-verify").code == 0
    assert wellformed.layout(tmp_path / "work" / "out") == 2


def test_an_overlay_is_well_formed(tmp_path: Path) -> None:
    overlays.build(tmp_path / "overlay")
    assert wellformed.layout(tmp_path / "overlay") == 2


def test_a_published_index_and_its_attachments_are_well_formed(
    programs: Programs,
    registry: Registry,
    second: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_verify_now", files_only)
    overlays.build_index(tmp_path / "many")
    overlays.evidence(tmp_path / "many")
    for number, address in enumerate((registry.address, second.address)):
        assert publish(tmp_path / "many", "--to", f"{address}/valid/many", "--move-tag", "v") == 0
        name = f"{address}/valid/many:v"
        assert wellformed.published(programs, name, tmp_path / f"back{number}") == 5
        opened = repository(address, "valid/many")
        entries = json.loads(opened.manifest("v").data)["manifests"]
        proofs = [p for e in entries for p in attached(address, "valid/many", e["digest"])]
        assert len(proofs) == 6
        for proof in proofs:
            wellformed.manifest(opened.manifest(proof.digest).data, OCI_MANIFEST, proof.digest)
