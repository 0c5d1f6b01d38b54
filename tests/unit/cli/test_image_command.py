"""``spark-build image`` on images in layouts: places, platforms, indexes, and verification."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.values import ApplyError
from builder.common.background import wait_for_background
from builder.common.plan import ExpectedChoice
from builder.common.reference import Ref
from builder.errors import RemoteError
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import DOCKER_CONFIG, DOCKER_INDEX, DOCKER_MANIFEST, RawManifest
from builder.images.rootfs.image import open_image
from builder.layers.catalog import Selection
from builder.pipeline import verify
from builder.proof.runners import InSandbox
from builder.proof.target import Refusal
from tests.unit.fakes import vllm_files
from tests.unit.imagefiles import (
    CONFIG,
    SITE,
    Item,
    packed,
    put_image,
    put_index,
    put_vllm,
    python_items,
    site_items,
    tar_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.caller import Call


IMAGE = ("image", "-l", "fix")


def test_from_a_layout_into_a_layout(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert done.code == 0, done.err
    name, _, digest = done.out.strip().partition("@")
    assert name == "oci:out"
    assert open_image(Ref("oci:out")).manifest.digest == digest
    assert re.search(r"^  PASS    static   \d+ checks$", done.err, re.MULTILINE)
    assert "layer fix" not in done.err.partition("• verify")[2], "passes are folded"
    assert " 0 fail" in done.err


def test_every_check_with_verbose(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    done = call("-v", *IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert "PASS    static   layer fix" in done.err
    assert not re.search(r"PASS    static   \d+ checks", done.err)


def test_in_json(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out", "--json")
    assert done.code == 0, done.err
    assert done.json["engine"] == "oci"
    assert done.json["verify"]["passed"] is True
    assert done.json["digest"] == open_image(Ref("oci:out")).manifest.digest
    planned = call("plan", "-l", "fix", "-b", f"oci:{tmp_path}/base", "--json").json
    assert planned["plan_digest"] == done.json["plan_digest"]
    assert str(tmp_path) not in done.json["plan_digest"] + json.dumps(planned["base"])


def test_without_an_output_it_goes_into_a_new_folder(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--no-verify")
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "work").iterdir()
    assert done.out.startswith(f"oci:{folder.name}@sha256:")
    assert folder.name.startswith("spark-build-")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--push"], 2, "no destination to push to"),
        (["--output", "registry"], 2, "no destination to push to"),
        (["--push", "--output", "oci:x", "-t", "h.example/a:1"], 2, "two places"),
        (["--output", "somewhere"], 2, "is not docker, oci:DIR or registry"),
        (["--output", "docker"], 6, "no Docker Engine is running"),
        (["--engine", "buildkit"], 6, "no docker client"),
        (["--others", "maybe"], 2, "neither keep nor drop"),
        (["--all-platforms"], 2, "not an index"),
        (["--push", "-t", "127.0.0.1:1/x:1"], 8, "127.0.0.1:1"),
    ],
)
def test_destinations_that_are_refused(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker client
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", *words)
    assert done.code == code, done.err
    assert any(part in done.err for part in message.split("|")), done.err
    assert not list((tmp_path / "work").iterdir())


def test_a_patched_layout_verifies_and_a_damaged_one_does_not(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out", "--no-verify")
    good = call("verify", "oci:out", "--level", "static", "--json")
    assert (good.code, good.json["passed"]) == (0, True)
    image = open_image(Ref("oci:out"))
    layers = [LayoutDirectory(tmp_path / "work/out").open(layer) for layer in image.layers]
    blobs = []
    for layer in layers:
        with layer as stream:
            blobs.append(stream.read())
    spoiled = packed(tar_of(Item(f"{SITE}/vllm/core.py", b"BACKEND = 'other'\n")))
    config = dict(image.config.settings)
    put_image(tmp_path / "spoiled", *blobs, spoiled, config=config)
    bad = call("verify", f"oci:{tmp_path}/spoiled", "--level", "static", "--json")
    assert bad.code == 5
    failed = {check["name"] for check in bad.json["checks"] if check["status"] == "fail"}
    assert {"layer fix", "no other file touched"} <= failed


def test_an_image_whose_verification_is_interrupted_stays(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    put_vllm(tmp_path / "base")
    monkeypatch.setattr(verify, "verify_built", interrupted)
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert done.code == 130
    digest = open_image(Ref("oci:out")).manifest.digest
    assert f"error: interrupted; oci:out@{digest} is complete, but not verified" in done.err


def test_a_foreign_image_needs_layers_to_compare_with(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    assert "has no spark-build plan" in call("verify", f"oci:{tmp_path}/base").err
    done = call("verify", f"oci:{tmp_path}/base", "-l", "fix", "--level", "static", "--json")
    assert done.code == 5
    assert done.json["checks"][0]["name"] == "layer fix"


# ---------------------------------------------------------------------------- several platforms


def put_both(root: Path, name: str = "all", **arm64: Any) -> RawManifest:
    """An index with arm64 and amd64, and what attests to each."""
    raws = {
        "amd64": put_vllm(root, architecture="amd64", name="amd"),
        "arm64": put_vllm(root, name="arm", **arm64),
    }
    index = put_index(root, raws, name="plain").json()
    for architecture, raw in raws.items():
        attests = put_image(root, name=f"about-{architecture}")
        index["manifests"].append(
            {
                **attests.descriptor.as_json(),
                "platform": {"os": "unknown", "architecture": "unknown"},
                "annotations": {
                    "vnd.docker.reference.type": "attestation-manifest",
                    "vnd.docker.reference.digest": raw.digest,
                },
            }
        )
    made = RawManifest(data=json.dumps(index).encode(), media_type=index["mediaType"])
    LayoutDirectory(root).put_manifest(made, name)
    return made


def entries_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = open_image(Ref(name), "linux/arm64").top.json()["manifests"]
    return found


def core_of(call_dir: Path, platform: str) -> bytes:
    from builder.images.rootfs.image import LayerCache
    from builder.images.rootfs.view import Rootfs

    image = open_image(Ref(f"oci:{call_dir}"), platform)
    data = Rootfs(image.layers, LayerCache(image.source)).read(f"/{SITE}/vllm/core.py")
    assert data is not None
    return data


def test_every_entry_of_an_index_is_patched(call: Call, tmp_path: Path) -> None:
    put_both(tmp_path / "base")
    base = f"oci:{tmp_path}/base:all"
    done = call(*IMAGE, "-b", base, "--all-platforms", "--output", "oci:out", "--json")
    assert done.code == 0, done.err
    assert [plan["base"]["platform"] for plan in done.json["plans"]] == [
        "linux/amd64", "linux/arm64",
    ]  # fmt: skip
    assert done.json["verify"]["passed"] is True
    assert [e["platform"]["architecture"] for e in entries_of("oci:out")] == ["amd64", "arm64"]
    for platform in ("linux/amd64", "linux/arm64"):
        assert b"b12x" in core_of(tmp_path / "work/out", platform)
    again = call(*IMAGE, "-b", base, "--all-platforms", "--output", "oci:again", "--no-verify")
    assert again.out.strip().rpartition("@")[2] == done.json["digest"]


@pytest.mark.parametrize("others", ["keep", "drop"])
def test_index_entries_that_the_profile_does_not_support(
    call: Call, tmp_path: Path, others: str
) -> None:
    old = [*python_items(), *site_items(vllm_files("0.19.0"))]
    raws = {
        "amd64": put_image(
            tmp_path / "base", packed(tar_of(*old)), architecture="amd64", config=CONFIG
        ),
        "arm64": put_vllm(tmp_path / "base", name="x"),
    }
    put_index(tmp_path / "base", raws, name="all")
    base = f"oci:{tmp_path}/base:all"
    done = call(*IMAGE, "-b", base, "--all-platforms", "--others", others, "--output", "oci:out")
    assert done.code == 0, done.err
    assert "linux/amd64 is not patched: nothing to do" in done.err
    kept = [e["platform"]["architecture"] for e in entries_of("oci:out")]
    assert kept == (["amd64", "arm64"] if others == "keep" else ["arm64"])
    if others == "keep":
        assert entries_of("oci:out")[0]["digest"] == raws["amd64"].digest
        assert b"cutlass" in core_of(tmp_path / "work/out", "linux/amd64")


@pytest.mark.parametrize("others", ["keep", "drop"])
def test_other_platforms_are_kept_only_on_request(call: Call, tmp_path: Path, others: str) -> None:
    both = put_both(tmp_path / "base").json()
    more = [{"os": "windows", "architecture": "amd64", "os.version": "10.0.20348.2402"},
            {"os": "linux", "architecture": "arm64", "variant": "v9"}]  # fmt: skip
    for number, platform in enumerate(more):
        raw = put_vllm(tmp_path / "base", packed(tar_of(Item(f"n{number}"))), name=f"n{number}")
        both["manifests"].insert(0, {**raw.descriptor.as_json(), "platform": platform})
    both["annotations"] = {"example.com/team": "kernels"}
    made = RawManifest(data=json.dumps(both).encode(), media_type=both["mediaType"])
    LayoutDirectory(tmp_path / "base").put_manifest(made, "four")
    words = ("-b", f"oci:{tmp_path}/base:four", "--all-platforms", "--output", "oci:out")
    done = call(*IMAGE, *words, *(["--others", others] if others == "keep" else []), "--no-verify")
    assert done.code == 0, done.err
    now = [e for e in entries_of("oci:out") if e["platform"]["architecture"] != "unknown"]
    assert now[:-2] == (both["manifests"][:2] if others == "keep" else [])
    assert [e["platform"]["architecture"] for e in now[-2:]] == ["amd64", "arm64"]
    index = open_image(Ref("oci:out"), "linux/arm64").top.json()
    assert index["annotations"]["example.com/team"] == "kernels"
    become = "kept as they are" if others == "keep" else "left out (see --others)"
    assert f"linux/arm64/v9, windows/amd64: {become}" in done.err
    assert b"b12x" in core_of(tmp_path / "work/out", "linux/arm64")


def test_one_platform_is_patched_and_the_others_are_kept(call: Call, tmp_path: Path) -> None:
    was = put_both(tmp_path / "base").json()["manifests"]
    base = f"oci:{tmp_path}/base:all"
    words = ("--platform", "linux/amd64", "--others", "keep", "--output", "oci:out")
    assert call(*IMAGE, "-b", base, *words).code == 0
    now = entries_of("oci:out")
    assert [e["digest"] for e in now[1:]] == [was[1]["digest"], was[3]["digest"]]
    assert now[0]["digest"] != was[0]["digest"]
    assert "annotations" not in now[0], "what attested to the base's entry is gone"


def test_a_docker_manifest_list_stays_a_manifest_list(call: Call, tmp_path: Path) -> None:
    types = {"manifest": DOCKER_MANIFEST, "config": DOCKER_CONFIG}
    raws = {a: put_vllm(tmp_path / "base", architecture=a, media_types=types, name=a)
            for a in ("amd64", "arm64")}  # fmt: skip
    index = put_index(tmp_path / "base", raws).json() | {"mediaType": DOCKER_INDEX}
    made = RawManifest(data=json.dumps(index).encode(), media_type=DOCKER_INDEX)
    LayoutDirectory(tmp_path / "base").put_manifest(made, "list")
    base = f"oci:{tmp_path}/base:list"
    assert call(*IMAGE, "-b", base, "--all-platforms", "--output", "oci:out").code == 0
    top = open_image(Ref("oci:out"), "linux/arm64").top
    assert top.media_type == DOCKER_INDEX
    assert "annotations" not in top.json()
    assert {e["mediaType"] for e in top.json()["manifests"]} == {DOCKER_MANIFEST}


def test_options_that_conflict_with_an_index(call: Call, tmp_path: Path) -> None:
    put_both(tmp_path / "base")
    base = f"oci:{tmp_path}/base:all"
    for words, message in (
        (["--platform", "linux/arm64"], "contradict each other"),
        (["--engine", "buildkit"], "builds for one platform"),
        (["--output", "docker"], "no Docker Engine is running"),
    ):
        done = call(*IMAGE, "-b", base, "--all-platforms", *words)
        assert done.code in (2, 6)
        assert message in done.err
    done = call(*IMAGE, "-b", "pypi:vllm==0.20.1", "--all-platforms")
    assert "need an image index" in done.err
    dry = call(*IMAGE, "-b", base, "--all-platforms", "--dry-run", "--json")
    assert len(dry.json["plans"]) == 2
    assert not list((tmp_path / "work").iterdir())


def test_an_index_without_a_supported_image(call: Call, tmp_path: Path) -> None:
    old = packed(tar_of(*python_items(), *site_items(vllm_files("0.19.0"))))
    raws = {a: put_image(tmp_path / "base", old, architecture=a, config=CONFIG, name=a)
            for a in ("amd64", "arm64")}  # fmt: skip
    put_index(tmp_path / "base", raws, name="all")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base:all", "--all-platforms")
    assert done.code == 3


class Maker:
    """Stands for the sandbox: when it was made, and in which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def maker(self) -> Callable[[], object]:
        return lambda: self.threads.append(threading.current_thread().name)

    def dispatch(self, _request: object) -> Refusal:
        wait_for_background()
        return Refusal("not in this test")


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch, call: Call) -> Maker:
    maker = Maker()
    monkeypatch.setattr(InSandbox, "dispatch", lambda _probe, request: maker.dispatch(request))
    monkeypatch.setattr(InSandbox, "common_maker", lambda _probe: maker.maker())
    monkeypatch.setattr(InSandbox, "maker", lambda _probe: maker.maker())
    monkeypatch.setattr(InSandbox, "ahead", lambda _probe, _request: maker.maker())
    return maker


@pytest.fixture
def expecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profile has it, a kernel is expected."""
    expected = (ExpectedChoice(kind="nvfp4-moe", line="a line of vLLM"),)
    monkeypatch.setattr(Selection, "expected", lambda *_: expected)


@pytest.mark.usefixtures("expecting")
def test_the_sandbox_is_prepared_during_the_build(
    call: Call, tmp_path: Path, sandbox: Maker
) -> None:
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert done.code == 0, done.err
    assert sandbox.threads == ["beside"] * 3


@pytest.mark.usefixtures("expecting", "sandbox")
@pytest.mark.parametrize("error", [RemoteError("the index is gone"), ApplyError("no file", 8)])
def test_what_cannot_be_asked_ahead_is_left_to_verification(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def ahead(*_: object) -> object:
        raise error

    monkeypatch.setattr(InSandbox, "ahead", ahead)
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert done.code == 0, done.err
    assert str(error) not in done.err


@pytest.mark.usefixtures("expecting")
def test_a_sandbox_that_exists_is_not_asked_ahead(
    call: Call, tmp_path: Path, sandbox: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer may be in the cache."""
    monkeypatch.setattr(InSandbox, "common_maker", lambda _probe: None)
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert done.code == 0, done.err
    assert sandbox.threads == []


def test_without_expected_kernels_no_sandbox_is_made(
    call: Call, tmp_path: Path, sandbox: Maker
) -> None:
    put_vllm(tmp_path / "base")
    done = call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    assert done.code == 0, done.err
    assert sandbox.threads == []


@pytest.mark.usefixtures("expecting")
@pytest.mark.parametrize("words", [("--no-verify",), ("--dry-run",), ("--print-dockerfile",)])
def test_without_verification_no_sandbox_is_made(
    call: Call, tmp_path: Path, sandbox: Maker, words: tuple[str, ...]
) -> None:
    put_vllm(tmp_path / "base")
    where = ("-b", f"oci:{tmp_path}/base", "--output", "oci:out")
    done = call(*IMAGE, *where, *words)
    assert done.code == 0, done.err
    assert sandbox.threads == []
