"""What is attached to an image, held against the schemas of those who defined it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.document import plain, read
from builder.common.plan import BakedPlan
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import OciEngine
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import OCI_EMPTY
from builder.publishing import evidence
from builder.publishing import evidence as made_by
from builder.publishing.evidence import provenance
from builder.publishing.repository import Attachment
from builder.publishing.subject import Baked, Image, read_baked, read_subject
from tests.unit.fakes import (
    BACKEND,
    copy_op,
    dist_files,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    vllm_files,
)

if TYPE_CHECKING:
    from pathlib import Path

WHEEL = make_wheel("lib", "2", {"lib/__init__.py": "NEW = 1\n", "lib/extra.py": ""})
SITE = "/usr/lib/python3/dist-packages"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Image, Baked]:
    """An overlay with an edit, a new file, a whole wheel, and a layer that does nothing."""
    files = vllm_files() | dist_files("lib", "1", {"lib/__init__.py": "", "lib/gone.py": ""})
    wheels = ({"filename": "vllm-0.20.1-cp38-abi3-linux_aarch64.whl", "sha256": "ab" * 32},)
    layers = (
        make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n")),
        make_layer("lib", {"op": "wheel", "distribution": "lib", "version": "2"}, wheels=[WHEEL]),
        make_layer("idle", BACKEND, package="sglang"),
    )
    plan = make_plan_of(fake_base(files, wheels=wheels), *layers, wheels=[WHEEL])
    OciEngine().build(BuildRequest(plan=plan, tag="x:1", output=tmp_path / "out"))
    source = LayoutDirectory(tmp_path / "out")
    image = read_subject(source, "").images[0]
    return image, read_baked(source, image)


def test_bill_of_materials_is_cyclonedx(made: tuple[Image, Baked]) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    data = evidence.bill_of_materials(*made)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(data.decode()) is None
    assert data == evidence.bill_of_materials(*made), "the same every time"
    document = json.loads(data)
    del document["components"][0]["name"]
    assert validator.validate_str(json.dumps(document)) is not None, "the schema is looked at"


def test_bill_of_materials_lists_the_additions(made: tuple[Image, Baked]) -> None:
    document = json.loads(evidence.bill_of_materials(*made))
    parts = {part["bom-ref"]: part for part in document["components"]}
    wheel = parts[f"wheel:{WHEEL.filename}"]
    assert wheel["purl"].startswith("pkg:pypi/lib@2?file_name=")
    assert wheel["hashes"] == [{"alg": "SHA-256", "content": WHEEL.pin["sha256"]}]
    for path in ("vllm/core.py", "vllm/new.py", "lib/extra.py"):
        assert f"file:{SITE}/{path}" in parts
    assert f"file:{SITE}/lib/gone.py" not in parts, "it is not in the image"
    assert "file:/usr/share/spark-build/plan.json" in parts
    assert "file:/usr/local/bin/spark-verify" in parts
    root = document["metadata"]["component"]["bom-ref"]
    (edges,) = [d["dependsOn"] for d in document["dependencies"] if d["ref"] == root]
    assert set(edges) == set(parts)
    text = json.dumps(document)
    assert "/tmp" not in text
    assert "/home" not in text


def test_provenance_is_slsa(made: tuple[Image, Baked]) -> None:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement, statement_pb2

    image, baked = made
    data = provenance(image, baked)
    parsed = json_format.Parse(data, statement_pb2.Statement())
    assert parsed.type == statement.STATEMENT_TYPE_URI
    (subject,) = parsed.subject
    checked = statement.Statement([subject], parsed.predicate_type, parsed.predicate)
    checked.validate()
    document = json.loads(data)
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    # unknown keys are errors for this parser, so every key is one of the predicate's own
    predicate = json_format.ParseDict(document["predicate"], provenance_pb2.Provenance())
    assert predicate.build_definition.build_type == made_by.BUILD_TYPE
    assert dict(subject.digest) == {"sha256": image.digest.removeprefix("sha256:")}
    found = {d.name: d.digest["sha256"] for d in predicate.build_definition.resolved_dependencies}
    assert found["base"] == "ab" * 32
    assert found["input"] == WHEEL.pin["sha256"]
    assert {name for name in found if name.startswith("layer ")} == {
        "layer fix", "layer lib", "layer idle",
    }  # fmt: skip
    assert predicate.run_details.builder.id == made_by.LOCAL_BUILDER
    assert not predicate.run_details.metadata.HasField("started_on"), "no clock"


def test_provenance_names_the_toolkit_image(
    made: tuple[Image, Baked],
) -> None:
    image, baked = made
    toolkit = {"image": "nvidia/cuda:13", "digest": "sha256:" + "ab" * 32}
    first, *others = plain(baked.plan)["layers"]
    stage = {
        "change": "c", "arch": "12.1a", "platform": "linux/arm64", "vllm": "1", "torch": "2",
        "module": "0" * 64, "compilers": {"nvcc": "13.0.88"}, "operators": ["_C::f"],
        "files": [], "units": [{"path": "f.cu", "extension": "_C", "gencode": []}], "inputs": [],
        "toolkit": toolkit,
    }  # fmt: skip
    compiled = {**first, "compile": {"wheel": None, "stage": stage}}
    plan = read({**plain(baked.plan), "layers": [compiled, *others]}, BakedPlan)
    recorded = dataclasses.replace(baked.recorded, document=plan)
    document = json.loads(provenance(image, dataclasses.replace(baked, recorded=recorded)))
    rows = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    wanted = {"uri": "docker://nvidia/cuda:13", "digest": {"sha256": "ab" * 32}}
    assert [row for row in rows if row["name"] == "toolkit"] == [{"name": "toolkit", **wanted}]
    assert b'"toolkit"' not in provenance(image, baked)


def test_provenance_names_the_commit_only_if_known(
    made: tuple[Image, Baked], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, baked = made
    monkeypatch.setattr(made_by, "source_commit", lambda: "c" * 40)
    assert b"c" * 40 in provenance(image, baked)
    other = dataclasses.replace(baked, version="0.0.1")
    assert b"c" * 40 not in provenance(image, other), "another spark-build made it"
    assert b'"spark-build":"0.0.1"' in provenance(image, other)
    edited = dict(baked.files) | {"/usr/share/spark-build/spark_apply.pyz": "0" * 64}
    assert b"c" * 40 not in provenance(image, dataclasses.replace(baked, files=edited))
    monkeypatch.setattr(made_by, "source_commit", lambda: "")
    assert b"gitCommit" not in provenance(image, baked)


def test_provenance_on_github_names_the_workflow(
    made: tuple[Image, Baked], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "GITHUB_ACTIONS": "true",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "me/spark",
        "GITHUB_WORKFLOW_REF": "me/spark/.github/workflows/publish.yml@refs/heads/main",
        "GITHUB_RUN_ID": "7",
        "GITHUB_RUN_ATTEMPT": "2",
    }.items():
        monkeypatch.setenv(name, value)
    run = json.loads(provenance(*made))["predicate"]["runDetails"]
    assert run["builder"]["id"].endswith("/me/spark/.github/workflows/publish.yml@refs/heads/main")
    assert run["metadata"]["invocationId"].endswith("/me/spark/actions/runs/7/attempts/2")


def test_an_attachment_is_an_artifact_with_a_subject(made: tuple[Image, Baked]) -> None:
    subject = made[0].manifest.descriptor
    proof = Attachment(artifact_type="text/x", data=b"words", annotations={"b": "1", "a": "2"})
    document: dict[str, Any] = proof.manifest(subject).json()
    assert document["subject"] == subject.as_json()
    assert (document["artifactType"], document["config"]["mediaType"]) == ("text/x", OCI_EMPTY)
    assert document["layers"] == [proof.blob.as_json()]
    assert proof.manifest(subject).data == proof.manifest(subject).data
