"""Images in a Docker Engine: published by the engine's own push, and held against a rebuild."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from . import cache, support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Engine, Registry
    from .support import Cli

#: Small: settings, and one line of vLLM.
PLAN = ("--layers", "marlin", "--base", "pypi:vllm==0.20.1")


@pytest.fixture(scope="module")
def overlay(cli: Cli, engine: Engine) -> Iterator[str]:
    """An overlay that BuildKit made, by name."""
    done = cli("image", *PLAN, "--engine", "buildkit", "--tag", "publish/overlay:1").ok()
    assert done.last.startswith("publish/overlay:1@")
    yield "publish/overlay:1"
    engine.run("image", "rm", "publish/overlay:1")


@pytest.fixture(scope="module")
def loaded(cli: Cli, engine: Engine) -> Iterator[str]:
    """The same plan from the embedded engine, loaded into the Docker Engine."""
    words = ("--engine", "oci", "--output", "docker", "--tag", "publish/loaded:1", "--no-verify")
    cli("image", *PLAN, *words).ok()
    yield "publish/loaded:1"
    engine.run("image", "rm", "publish/loaded:1")


def test_publish_from_the_engine(
    cli: Cli, engine: Engine, registry: Registry, overlay: str
) -> None:
    """It is verified first, by digest; the engine pushes; proofs and tags follow."""
    where = f"{registry.address}/engine/x"
    done = cli(
        "publish", overlay, "--overlay", "--to", where, "--move-tag", "latest", "--json"
    ).ok()
    (result,) = done.json["results"]
    assert (result["status"], result["verified"]) == ("published", True)
    (evidence,) = done.json["evidence"]
    assert evidence["levels"] == ["imports", "dispatch"], "startup hooks are not read there"
    identity = support.inspect(engine, overlay)["Id"]
    assert evidence["digest"] == identity

    skopeo = engine.tools.program("skopeo")
    tag = f"docker://{where}:{result['tag']}"
    seen = json.loads(cache.call(skopeo, "inspect", "--tls-verify=false", tag))
    assert seen["Digest"] == result["digest"]
    assert set(seen["RepoTags"]) >= {result["tag"], "latest"}

    again = cli(
        "publish", overlay, "--overlay", "--to", where, "--move-tag", "latest", "--json"
    ).ok()
    assert [r["status"] for r in again.json["results"]] == ["up to date"]
    (held,) = cli("tags", where, "--json").ok().json["images"]
    assert (held["verified"], held["digest"]) == (True, result["digest"])
    assert held["added_bytes"] > 1000
    assert not [name for name in support.tags(engine) if name.startswith(where)]

    engine.run("pull", "--quiet", f"{where}@{result['digest']}")
    engine.run("image", "rm", f"{where}@{result['digest']}")


def test_another_image_of_the_same_plan_is_refused(
    cli: Cli, registry: Registry, overlay: str, loaded: str
) -> None:
    where = f"{registry.address}/engine/taken"
    cli("publish", overlay, "--overlay", "--to", where, "--require", "static").ok()
    done = cli("publish", loaded, "--overlay", "--to", where, "--require", "static")
    assert done.code == 8
    assert "the same plan gave two images" in done.err


def test_dry_run_from_the_engine(cli: Cli, registry: Registry, overlay: str) -> None:
    where = f"{registry.address}/engine/dry"
    done = cli("publish", overlay, "--overlay", "--to", where, "--force", "--dry-run").ok()
    assert done.last.startswith(f"{where}:0.20.1-marlin-")
    assert not cli("tags", where, "--json").ok().json["images"]


def test_rebuild_of_an_image_that_was_loaded(cli: Cli, loaded: str) -> None:
    assert cli("rebuild", loaded).ok().last.startswith("same sha256:")


def test_rebuild_of_a_buildkit_image(cli: Cli, overlay: str) -> None:
    """Other tars, so another digest; every file is the same, and what BuildKit adds is named."""
    done = cli("rebuild", overlay, "--json")
    assert done.code == 5
    (image,) = done.json["images"]
    found = {row["where"]: row["what"] for row in image["differences"]}
    assert list(found) == ["Env.PATH"], "BuildKit gives an image from nothing a PATH"
    assert "rebuilt absent" in found["Env.PATH"]


def test_rebuild_of_an_image_that_was_changed(
    cli: Cli, engine: Engine, overlay: str, build: support.Built
) -> None:
    """A file of ours and a variable are others: both are named."""
    script = "/usr/share/spark-build/serve-flags.json"
    changed = build(
        "publish/changed:1",
        f"FROM {overlay}\nCOPY <<EOF {script}\n[]\nEOF\nENV VLLM_NVFP4_GEMM_BACKEND=cutlass\n",
    )
    done = cli("rebuild", changed, "--json")
    assert done.code == 5
    found = {row["where"]: row["what"] for row in done.json["images"][0]["differences"]}
    assert found[script].startswith("bytes 0-")
    assert found["Env.VLLM_NVFP4_GEMM_BACKEND"] == '"cutlass", rebuilt "marlin"'
