"""An overlay is not an image: it says what it is wherever it goes, also one of an older release."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.reference import Ref
from builder.errors import UsageError
from builder.images.engines import baked
from builder.images.engines.model import BuildRequest, BuiltImage
from builder.images.engines.oci import OciEngine, write_dockerfile
from builder.images.registry.copy import Locations
from builder.images.registry.layout import LayoutDirectory
from builder.publishing.sources import check_overlay, how_to_run, open_source
from builder.publishing.subject import read_subject
from builder.publishing.tags import HeldRow, StoredManifest
from tests.unit.fakes import BACKEND, fake_base, make_layer, make_plan_of, vllm_files
from tests.unit.imagefiles import put_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.plan import BuildPlan
    from tests.unit.caller import Call

TO = ("--to", "h.example/me/x")


def plan_of() -> BuildPlan:
    return make_plan_of(fake_base(vllm_files()), make_layer("fix", BACKEND))


def build(out: Path) -> BuiltImage:
    return OciEngine().build(BuildRequest(plan=plan_of(), tag="me/a:1", output=out))


def manifest_of(out: Path) -> dict[str, Any]:
    return LayoutDirectory(out).manifest("").json()


def test_its_manifest_marks_it_as_an_overlay(tmp_path: Path) -> None:
    build(tmp_path / "out")
    assert manifest_of(tmp_path / "out")["artifactType"] == baked.OVERLAY_TYPE
    assert read_subject(LayoutDirectory(tmp_path / "out"), "").overlay


def test_an_overlay_of_an_older_version_is_recognised_by_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(baked, "OVERLAY_TYPE", "")
        build(tmp_path / "out")
    assert not manifest_of(tmp_path / "out")["artifactType"]
    subject = read_subject(LayoutDirectory(tmp_path / "out"), "")
    assert subject.overlay
    held = StoredManifest(digest=subject.digest, tags=("a",), subject=subject)
    assert HeldRow.of(held).overlay
    with (
        Locations() as places,
        open_source(Ref(f"oci:{tmp_path}/out"), places) as opened,
        pytest.raises(UsageError, match="is an overlay"),
    ):
        check_overlay(opened, allowed=False, to=TO)


def test_it_is_published_only_as_an_overlay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    made = build(out)
    with Locations() as places, open_source(Ref(f"oci:{out}"), places) as opened:
        with pytest.raises(UsageError, match="without Python and vLLM") as caught:
            check_overlay(opened, allowed=False, to=TO)
        words = str(caught.value)
        assert f"spark-build publish oci:{out} --to h.example/me/x --overlay" in words
        assert "spark-build publish spark-build/test:0.20.1 --to h.example/me/x\n" in words
        assert str(caught.value.hint).startswith("docker buildx build --platform linux/arm64 ")
        assert "    FROM vllm/vllm-openai:v0.20.1" in str(caught.value), "no file has it"
        path = write_dockerfile(plan_of(), made)
        assert path is not None
        assert f" - <{path}" in how_to_run(opened)[0]
        assert "FROM" not in how_to_run(opened)[0]
        path.write_text(path.read_text().replace(made.digest, "sha256:" + "0" * 64))
        assert "FROM" in how_to_run(opened)[0], "that one is of another overlay"
        capsys.readouterr()
        check_overlay(opened, allowed=True, to=TO)
        assert "is an overlay: it runs on vllm/vllm-openai:v0.20.1" in capsys.readouterr().err


def test_its_dockerfile_builds_a_valid_image(tmp_path: Path) -> None:
    """Its labels are those of the overlay, but for the base: so it can be published."""
    path = write_dockerfile(plan_of(), build(tmp_path / "out"))
    assert path is not None
    labels = {}
    for line in path.read_text().splitlines():
        if line.startswith("LABEL "):
            name, _, value = line.removeprefix("LABEL ").partition("=")
            labels[json.loads(name)] = json.loads(value)
    assert labels[baked.PLAN_LABEL] == plan_of().digest
    assert labels[baked.BASE_LABEL] == "vllm/vllm-openai:v0.20.1"
    assert not baked.is_overlay(labels)


# ---------------------------------------------------------------------------- on the command line


def test_an_image_is_not_an_overlay(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    done = call(*("image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "-o", "oci:out", "--json"))
    assert done.code == 0, done.err
    assert "overlay" not in done.json
    assert "artifactType" not in manifest_of(tmp_path / "work" / "out")
    words = ("publish", "oci:out", "--to", "127.0.0.1:1/me/x", "--overlay")
    refused = call(*words)
    assert refused.code == 2
    assert "oci:out is an image, but --overlay is for overlays" in refused.err


def test_the_device_level_names_an_image_that_docker_can_run(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    image = ("image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "--no-verify")
    call(*image, "-o", "oci:out", "-t", "me/a:1")
    said = call("verify", "oci:out", "--level", "device", "--json").json["checks"][0]["reason"]
    assert said.endswith("--entrypoint spark-verify me/a:1")


def test_auto_reports_the_chosen_engine_and_the_reason(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_vllm(tmp_path / "base")
    image = ("image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "--no-verify")
    said = call(*image).err
    assert "engine  oci, because " in said
    assert "is read directly, without a Docker Engine" in said
    assert said.index("engine  oci") < said.index("build with oci")
    assert "because --output names an OCI layout" in call(*image, "-o", "oci:out").err
    assert "because" not in call(*image, "--engine", "oci", "-o", "oci:other").err
