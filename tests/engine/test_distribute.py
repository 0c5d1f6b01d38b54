"""``distribute`` to a machine behind a real SSH server, whose Docker Engine fetches by itself."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.images.registry.layout import LayoutDirectory
from builder.publishing.subject import read_subject
from tests.registry import overlays

from . import cache, machine, sshd, support

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Engine, EngineTools, Registry
    from .support import Cli

PLAN = ("--layers", "marlin", "--base", "pypi:vllm==0.20.1")
NAME = "sent/overlay:1"


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[sshd.Server]:
    """A node: its ``docker`` is the engine of these tests."""
    with cache.scratch("ssh") as work:
        names = ("DOCKER_HOST", "DOCKER_CONFIG", "PATH")
        with sshd.serve(work, {name: engine.env[name] for name in names}) as running:
            yield running


@pytest.fixture(scope="module")
def layout(cli: Cli) -> Iterator[Path]:
    """An overlay in a layout."""
    with cache.scratch("distribute") as work:
        cli("image", *PLAN, "--engine", "oci", "--output", f"oci:{work}/out", "--no-verify").ok()
        yield work / "out"


@pytest.fixture
def forget(engine: Engine) -> Iterator[None]:
    """The node has none of it before, and none of it after."""
    _remove(engine)
    yield
    _remove(engine)


def _remove(engine: Engine) -> None:
    names = [name for name in support.tags(engine) if name.startswith("sent/")]
    if names:
        engine.run("image", "rm", "--force", *names)


@pytest.mark.usefixtures("forget")
def test_only_missing_layers_are_sent(
    cli: Cli, engine: Engine, server: sshd.Server, layout: Path
) -> None:
    (image,) = read_subject(LayoutDirectory(layout), "").images
    words = ("distribute", f"oci:{layout}", "node", "--ssh", server.ssh, "--tag", NAME)
    (asked,) = cli(*words, "--dry-run", "--json").ok().json["nodes"]
    assert asked["missing_bytes"] == sum(layer.size for layer in image.layers)
    assert asked["sent_bytes"] == 0
    assert NAME not in support.tags(engine)

    done = cli(*words).ok()
    assert done.last == f"{NAME}@{image.digest}"
    assert support.inspect(engine, NAME)["Id"] == image.digest
    assert not [name for name in support.tags(engine) if "127.0.0.1" in name]

    (again,) = cli(*words, "--json").ok().json["nodes"]
    assert (again["status"], again["sent_blobs"], again["sent_bytes"]) == ("up to date", 0, 0)
    assert again["missing_layers"] == 0


@pytest.mark.usefixtures("forget")
def test_several_nodes_and_an_unreachable_one(
    cli: Cli, engine: Engine, server: sshd.Server, layout: Path
) -> None:
    words = ("distribute", f"oci:{layout}", "node", "node-2", "absent.invalid")
    done = cli(*words, "--ssh", server.ssh, "--tag", NAME, "--json")
    assert done.code == 8
    found = {row["host"]: row for row in done.json["nodes"]}
    assert {found["node"]["status"], found["node-2"]["status"]} <= {"fetched", "up to date"}
    assert found["absent.invalid"]["status"] == "failed"
    assert "absent.invalid" in found["absent.invalid"]["error"]["message"]
    assert done.json["error"]["code"] == 8
    assert NAME in support.tags(engine)


@pytest.mark.usefixtures("forget")
def test_a_node_with_the_base_gets_only_the_patches(
    cli: Cli,
    engine: Engine,
    server: sshd.Server,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thin layout: the base is on the node, and none of it passes through this machine."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    filler = 30_000_000
    base = overlays.put_base(tmp_path / "base", f"{registry.address}/sent/base:1", filler)
    engine.run("pull", "--quiet", "--platform", "linux/amd64", base)
    digest = overlays.build_on(base, tmp_path / "thin", platform="linux/amd64")
    words = ("distribute", f"oci:{tmp_path}/thin", "node", "--ssh", server.ssh, "--tag", NAME)
    (node,) = cli(*words, "--json").ok().json["nodes"]
    (image,) = read_subject(LayoutDirectory(tmp_path / "thin"), "").images
    ours = image.layers[3:]
    assert node["missing_layers"] == len(ours)
    assert node["missing_bytes"] == sum(layer.size for layer in ours)
    assert node["sent_bytes"] == node["missing_bytes"] + image.config.size
    assert support.inspect(engine, NAME)["Id"] == digest
    engine.run("image", "rm", base)


@pytest.mark.usefixtures("forget")
def test_a_damaged_layer_is_not_loaded(
    cli: Cli, engine: Engine, server: sshd.Server, layout: Path, tmp_path: Path
) -> None:
    subprocess.run(["cp", "-r", str(layout), str(tmp_path / "bad")], check=True)
    (image,) = read_subject(LayoutDirectory(layout), "").images
    blob = tmp_path / "bad" / "blobs" / "sha256" / image.layers[-1].digest.removeprefix("sha256:")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    words = ("distribute", f"oci:{tmp_path}/bad", "node", "--ssh", server.ssh, "--tag", NAME)
    done = cli(*words, "--json")
    assert done.code == 8
    assert image.layers[-1].digest in done.json["error"]["message"]
    assert NAME not in support.tags(engine)
    cli("distribute", f"oci:{layout}", "node", "--ssh", server.ssh, "--tag", NAME).ok()


@pytest.mark.usefixtures("forget")
def test_an_interrupted_transfer_resumes(
    cli: Cli,
    engine: Engine,
    server: sshd.Server,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The top layer cannot be read at first; the base's 70 MB below it are not sent twice."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    size = 70_000_000
    base = overlays.put_base(tmp_path / "base", f"{registry.address}/sent/large:1", size)
    overlays.build_on(base, tmp_path / "out", platform="linux/amd64", thin=False)
    (image,) = read_subject(LayoutDirectory(tmp_path / "out"), "").images
    top = tmp_path / "out/blobs/sha256" / image.layers[-1].digest.removeprefix("sha256:")
    top.rename(tmp_path / "top")
    words = ("distribute", f"oci:{tmp_path}/out", "node", "--ssh", server.ssh, "--tag", NAME)
    done = cli(*words, "--json")
    assert done.code == 8
    (first,) = done.json["nodes"]
    assert first["sent_bytes"] > size
    (tmp_path / "top").rename(top)
    (second,) = cli(*words, "--json").ok().json["nodes"]
    assert second["sent_bytes"] < 1_000_000
    assert second["missing_layers"] == len(image.layers) - 3
    assert support.inspect(engine, NAME)["Id"] == image.digest
    assert not [name for name in support.tags(engine) if "partial" in name]


@pytest.mark.usefixtures("forget")
def test_a_tag_that_was_just_built(cli: Cli, engine: Engine, server: sshd.Server) -> None:
    """Out of the engine, whose layers the node has, because it is the same engine."""
    cli("image", *PLAN, "--engine", "buildkit", "--tag", "sent/built:1", "--no-verify").ok()
    built = support.inspect(engine, "sent/built:1")["Id"]
    words = ("distribute", "sent/built:1", "node", "--ssh", server.ssh)
    done = cli(*words, "--tag", "sent/copy:1").ok()
    assert done.last.startswith("sent/copy:1@sha256:")
    assert support.inspect(engine, "sent/copy:1")["Id"] == built
    (node,) = cli(*words, "--dry-run", "--json").ok().json["nodes"]
    assert (node["missing_layers"], node["sent_bytes"]) == (0, 0)


@pytest.mark.usefixtures("forget")
def test_from_docker_s_own_store_to_another_machine(
    tools: EngineTools, engine: Engine, server: sshd.Server, tmp_path: Path
) -> None:
    """Two engines: the other one lacks the layers, and then has them."""
    with machine.ClassicEngine(tools) as here:
        cli = support.Cli(here.env, tmp_path)
        cli("image", *PLAN, "--engine", "buildkit", "--tag", "sent/classic:1", "--no-verify").ok()
        built = support.inspect(here, "sent/classic:1")
        words = ("distribute", "sent/classic:1", "node", "--ssh", server.ssh, "--json")
        (asked,) = cli(*words, "--dry-run").ok().json["nodes"]
        assert asked["missing_layers"] == len(built["RootFS"]["Layers"])
        (first,) = cli(*words).ok().json["nodes"]
        assert first["status"] == "fetched"
        assert first["sent_bytes"] >= asked["missing_bytes"] > 0
        copied = support.inspect(engine, "sent/classic:1")
        assert copied["RootFS"]["Layers"] == built["RootFS"]["Layers"]
        (again,) = cli(*words).ok().json["nodes"]
        assert (again["missing_layers"], again["missing_bytes"]) == (0, 0)


def test_a_node_without_docker(cli: Cli, engine: Engine, layout: Path) -> None:
    nothing = {"PATH": "/usr/bin:/bin", "DOCKER_HOST": "unix:///nowhere"}
    with cache.scratch("ssh") as work, sshd.serve(work, nothing) as bare:
        done = cli("distribute", f"oci:{layout}", "node", "--ssh", bare.ssh)
    assert done.code == 8
    assert "docker" in done.err


def test_usage(cli: Cli, layout: Path) -> None:
    assert cli("distribute", f"oci:{layout}", "--", "-oProxyCommand=x").code == 2
    assert cli("distribute", f"oci:{layout}", "a", "a").code == 2
    assert cli("distribute", f"oci:{layout}", "a", "--jobs", "0").code == 2
    assert cli("distribute", f"oci:{layout}", "a", "--ssh", "").code == 2
