"""The overlay of the oci engine, put onto an image as its recipe says, and into a registry."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import base, cache, support
from .support import LINEAR, MOE, PROFILE, WHEELS, Cli, Done

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Engine, Registry

RECEIPTS = ".spark-build/receipts/"
MATCHING = ("--platform", "linux/amd64", "--python", "3.11", "--site-packages", base.SITE)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the overlay is written."""
    with cache.scratch("overlay") as scratch:
        yield scratch / "layout"


@pytest.fixture(scope="module")
def made(cli: Cli, folder: Path) -> Done:
    """`spark-build image --engine oci` for what the base image is."""
    words = ("--base", WHEELS, *MATCHING, "--engine", "oci", "--output", f"oci:{folder}")
    return cli("image", "--layers", PROFILE, *words, "--no-verify").ok()


@pytest.fixture(scope="module")
def recipe(made: Done, folder: Path) -> list[str]:
    """The Dockerfile beside the layout; the command that builds it comes first."""
    path = folder.with_name(f"{folder.name}.Dockerfile")
    assert f"-t spark-build/{PROFILE}:" in made.err
    assert f" - <{path}" in made.err
    return path.read_text().splitlines()[1:]


@pytest.fixture(scope="module")
def overlaid(engine: Engine, folder: Path, recipe: list[str], base_image: str) -> Iterator[str]:
    """The image that the recipe makes, of the test's base in place of the official one."""
    context = re.search(r"overlay=(\S+)", recipe[0])
    assert context is not None
    digest, _ = support.layout_manifest(folder)
    assert context[1] == f"oci-layout://{folder}:overlay@{digest}"
    lines = [f"FROM {base_image}" if line.startswith("FROM ") else line for line in recipe]
    command = [engine.docker, *recipe[0].removeprefix("# docker ").split(" <")[0].split()]
    command[command.index("-t") + 1] = "overlaid:1"
    done = subprocess.run(
        command, input="\n".join(lines), env=engine.env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    yield "overlaid:1"
    engine.run("image", "rm", "overlaid:1")


def test_last_line_names_the_layout(made: Done, folder: Path) -> None:
    digest, _ = support.layout_manifest(folder)
    assert made.last == f"oci:{folder}@{digest}"


def test_recipe_is_for_the_official_image(recipe: list[str]) -> None:
    version = base.requirements()["vllm"]
    assert f"FROM vllm/vllm-openai:v{version}" in recipe
    (run,) = [line for line in recipe if line.startswith("RUN ")]
    assert run.startswith("RUN --network=none ["), "the step that takes files away needs no network"


def test_overlaid_image_has_the_same_files(
    engine: Engine, overlaid: str, built_tree: support.Tree
) -> None:
    """As one that was built on the image itself, but for what the receipts say of the base."""
    tree = support.tree_in_image(engine, overlaid)
    ours = (".spark-build",)
    assert not support.differences(support.without(tree, *ours), support.without(built_tree, *ours))


def test_overlaid_image_verifies_from_inside(engine: Engine, overlaid: str) -> None:
    words = ("run", "--rm", "--network=none", "--entrypoint", "spark-verify", overlaid, "--json")
    evidence = json.loads(engine.run(*words))
    assert evidence["passed"] is True
    dispatch = [check for check in evidence["checks"] if check["level"] == "dispatch"]
    seen = {check["name"]: check["seen"] for check in dispatch}
    assert seen["nvfp4-linear"] == LINEAR
    assert seen["nvfp4-moe"].startswith(MOE)
    assert [c["name"] for c in evidence["checks"] if c["name"].startswith("env ")]


def test_overlaid_image_verifies_from_outside(cli: Cli, overlaid: str) -> None:
    """Its own vLLM is asked, and the files are its own: it is no mere overlay any more."""
    done = cli("verify", overlaid, "--level", "static,dispatch", "--json").ok()
    assert done.json["passed"] is True
    assert done.checks("not-run") == {"static startup hooks"}, "the layers are not read"
    assert all("sandbox" not in p for c in done.json["checks"] for p in c.get("simulated", ()))


def test_skopeo_reads_the_layout(engine: Engine, made: Done, folder: Path) -> None:
    skopeo = engine.tools.program("skopeo")
    seen = json.loads(cache.call(skopeo, "inspect", f"oci:{folder}"))
    digest, manifest = support.layout_manifest(folder)
    assert seen["Digest"] == digest
    assert (seen["Os"], seen["Architecture"]) == ("linux", "amd64")
    assert seen["Layers"] == [layer["digest"] for layer in manifest["layers"]]
    assert seen["Labels"] == manifest["annotations"]


def test_skopeo_copies_the_layout(
    engine: Engine, registry: Registry, made: Done, folder: Path
) -> None:
    skopeo = engine.tools.program("skopeo")
    digest, _ = support.layout_manifest(folder)
    target = f"{registry.address}/overlay:1"
    words = ("--preserve-digests", "--dest-tls-verify=false", f"oci:{folder}", f"docker://{target}")
    cache.call(skopeo, "copy", "--quiet", *words)
    pinned = f"docker://{registry.address}/overlay@{digest}"
    seen = json.loads(cache.call(skopeo, "inspect", "--tls-verify=false", pinned))
    assert seen["Digest"] == digest
    engine.run("pull", "--quiet", f"{registry.address}/overlay@{digest}")
    pulled = support.inspect(engine, f"{registry.address}/overlay@{digest}")
    assert support.environment_of(pulled["Config"])["CUTE_DSL_ARCH"] == "sm_121a"
    engine.run("image", "rm", f"{registry.address}/overlay@{digest}")


def test_the_image_is_published_and_the_overlay_is_not(
    cli: Cli, registry: Registry, overlaid: str, folder: Path
) -> None:
    where = ("--to", f"{registry.address}/overlaid/x")
    done = cli("publish", overlaid, *where, "--require", "static", "--json").ok()
    assert done.json["overlay"] is False
    (result,) = done.json["results"]
    assert (result["status"], result["verified"]) == ("published", True)
    refused = cli("publish", f"oci:{folder}", *where, "--force")
    assert refused.code == 2
    assert f"{folder}.Dockerfile" in refused.err


def test_layers_are_removed_from_an_overlaid_image_with_its_wheels(
    cli: Cli, overlaid: str, built_tree: support.Tree
) -> None:
    """It does not say which image is below; the released wheels have the files as they were."""
    done = cli("verify", overlaid, "--prove-necessary", "--level", "static", "--json").ok()
    in_force = [v for v in done.json["necessity"] if v["state"] == "needed"]
    receipts = {Path(path).stem for path in built_tree if path.startswith(RECEIPTS)}
    assert {verdict["layer"] for verdict in in_force} == receipts
    for verdict in in_force:
        assert verdict["necessary"] == "unknown"
        assert verdict["reason"].startswith("no check fails without it (static), but ")
        assert "requested" in verdict["reason"]
