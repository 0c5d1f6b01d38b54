"""Builds on a BuildKit that is not in the Docker Engine beside us, with caches in a registry.

The builder is the BuildKit of a second, empty Docker Engine, reached by buildx's remote driver.
The base is a small made-up vLLM, so that no engine has to be filled first.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from builder.images.registry.client import Registry as Client
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import Descriptor
from builder.images.rootfs.tar import WHITEOUT_PREFIX
from tests.unit.imagefiles import CONFIG, SITE, Item, put_image, python_items, site_items, tar_of
from tests.unit.imagefiles import folder as folder_item

from . import machine, support
from .bridge import buildkit_socket
from .support import Built, Cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Registry

PLAIN = "application/vnd.oci.image.layer.v1.tar"
NAMES = ("one", "two", "three")
LAYER = """\
summary = "Set X in {name}.py"
description = "For tests."
order = {order}
package = "vllm"

[provenance]
origin = "vendor, tests"
forwarded = "not-needed"
applied-upstream = "no"
last-update = 2026-11-20

[[variant]]
name = "all"
when = {{ "vllm" = ">=0" }}

[[variant.op]]
op = "replace"
file = "vllm/{name}.py"
old = "X = 0"
new = "X = {value}"
"""


@dataclass
class World:
    """A builder, a registry with a base, layers, and the command line."""

    cli: Cli
    near: machine.Engine
    far: machine.Engine
    address: str
    registry: str
    patches: Path

    @property
    def base(self) -> str:
        return f"docker://{self.registry}/base/vllm:1"

    def set(self, name: str, value: int) -> None:
        """Write a layer."""
        folder = self.patches / name
        folder.mkdir(parents=True, exist_ok=True)
        text = LAYER.format(name=name, value=value, order=10 * NAMES.index(name) + 10)
        (folder / "layer.toml").write_text(text)

    def image(self, *words: str, builder: str = "", base: str = "") -> support.Done:
        """Build with all three layers."""
        layers = ("-l", ",".join(NAMES), "--patches", str(self.patches), "--no-verify")
        on = ("--builder", builder or self.address)
        return self.cli("image", *layers, "-b", base or self.base, *on, *words)

    def push(self, *words: str, tag: str = "out/vllm:1") -> dict[str, Any]:
        """Build and push; the document."""
        return self.image("--push", "-t", f"{self.registry}/{tag}", "--json", *words).ok().json

    def forget(self) -> None:
        """Take away all that the builder knows."""
        for made in support.tags(self.far):
            self.far.run("image", "rm", "--force", made)
        self.far.run("builder", "prune", "--all", "--force")


def cached(document: dict[str, Any]) -> dict[str, bool]:
    return {layer["name"]: layer["cached"] for layer in document["layers"]}


def same(value: bool) -> dict[str, bool]:
    return dict.fromkeys(NAMES, value)


@pytest.fixture(scope="module")
def engines(tools: machine.EngineTools) -> Iterator[tuple[machine.Engine, machine.Engine]]:
    with machine.FreshEngine(tools) as near, machine.FreshEngine(tools) as far:
        yield near, far


@pytest.fixture(scope="module")
def world(
    engines: tuple[machine.Engine, machine.Engine],
    registry: Registry,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    near, far = engines
    folder = tmp_path_factory.mktemp("builders")
    items = [Item(f"{SITE}/vllm/{name}.py", b"X = 0\n") for name in NAMES]
    layers = tar_of(folder_item("opt/"), *python_items()), tar_of(*site_items(), *items)
    put_image(
        folder / "base",
        *layers,
        name="1",
        architecture="amd64",
        config=CONFIG,
        layer_type=PLAIN,  # whose digest is a true diff_id
    )
    target = Client(registry.address).repository("base/vllm")
    copy_image(LayoutDirectory(folder / "base"), "1", target, "1")
    with buildkit_socket(far, far._work) as address:
        made = World(
            cli=Cli(near.env, folder),
            near=near,
            far=far,
            address=address,
            registry=registry.address,
            patches=folder / "patches",
        )
        for name in NAMES:
            made.set(name, 1)
        yield made


@pytest.fixture
def named(world: World) -> Iterator[str]:
    """The same as a builder that has a name."""
    words = ("buildx", "create", "--name", "farm", "--driver", "remote", world.address)
    world.near.run(*words)
    yield "farm"
    world.near.run("buildx", "rm", "farm")


def known_builders(world: World) -> list[str]:
    listed = world.near.run("buildx", "ls").splitlines()[1:]
    return [line.split()[0].rstrip("*") for line in listed if not line.startswith(" ")]


def text_in(world: World, name: str, tag: str) -> str:
    """What the pushed image has in a module, read by our own reader of layers."""
    repository = Client(world.registry).repository(tag.partition(":")[0])
    found = ""
    manifest = repository.manifest(tag.partition(":")[2])
    for row in manifest.json()["layers"]:
        with repository.open(Descriptor.parse(row, tag)) as stream:
            data = stream.read(row["size"] + 1)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                assert WHITEOUT_PREFIX not in member.name
                if f"/{member.name}" == f"/{SITE.strip('/')}/vllm/{name}.py":
                    held = tar.extractfile(member)
                    assert held is not None
                    found = held.read().decode()
    return found


# ------------------------------------------------------------------------------- where it is built


def test_an_address_builds_and_pushes(world: World) -> None:
    world.forget()
    before = known_builders(world)
    done = world.push()
    assert cached(done) == same(False)
    manifest = Client(world.registry).repository("out/vllm").manifest("1")
    assert manifest.digest == done["digest"]
    was = Client(world.registry).repository("base/vllm").manifest("1").json()["layers"]
    assert [row["digest"] for row in manifest.json()["layers"]][: len(was)] == [
        row["digest"] for row in was
    ]
    assert len(manifest.json()["layers"]) == len(was) + len(NAMES) + 1
    assert text_in(world, "two", "out/vllm:1") == "X = 1\n"
    assert known_builders(world) == before, "no builder of ours is left"
    assert not support.tags(world.near), "nothing went through the engine beside us"
    target = f"docker://{done['image']}@{done['digest']}"
    words = ("-l", ",".join(NAMES), "--patches", world.patches, "--level", "static")
    world.cli("verify", target, *words).ok()


def test_a_named_builder_writes_a_layout(world: World, named: str, tmp_path: Path) -> None:
    output = f"oci:{tmp_path}/out"
    done = world.image("--output", output, "-t", "out:1", builder=named).ok()
    digest, manifest = support.layout_manifest(tmp_path / "out")
    assert done.last == f"{output}@{digest}"
    for row in manifest["layers"]:
        assert support.layout_blob(tmp_path / "out", row["digest"]).stat().st_size == row["size"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again = world.image("--output", output, "-t", "out:1", builder=named).ok()
    assert again.last == done.last


def test_a_builder_loads_the_image_into_the_local_engine(world: World) -> None:
    done = world.image("--output", "docker", "-t", "near:1", "--json").ok().json
    try:
        assert support.inspect(world.near, "near:1")["Id"] == done["digest"]
        labels = support.inspect(world.near, "near:1")["Config"]["Labels"]
        assert done["plan_digest"] in labels.values()
    finally:
        world.near.run("image", "rm", "--force", "near:1")


# ------------------------------------------------------------------------------------- what is kept


def test_a_changed_layer_keeps_the_others_cached(world: World) -> None:
    world.push()
    world.set("two", 2)
    try:
        done = world.push()
        assert cached(done) == {"one": True, "two": False, "three": True}
        assert text_in(world, "two", "out/vllm:1") == "X = 2\n"
    finally:
        world.set("two", 1)


def test_a_cache_in_a_registry_serves_a_fresh_builder(world: World) -> None:
    place = f"{world.registry}/cache/vllm:main"
    first = world.push("--cache-to", place)
    world.forget()
    assert cached(world.push()) == same(False), "the builder forgot"
    world.forget()
    again = world.push("--cache-from", f"type=registry,ref={place}")
    assert cached(again) == same(True)
    assert again["digest"] == first["digest"]


# --------------------------------------------------------------------------------- what goes wrong


def test_an_unknown_builder(world: World) -> None:
    done = world.image("--push", "-t", f"{world.registry}/no/thing:1", "--json", builder="farn")
    assert done.code == 6
    error = done.json["error"]
    assert 'no builder "farn" found' in error["message"]
    assert error["hint"] == "docker buildx ls"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "unix:///nonexistent/buildkit.sock"])
def test_an_address_that_does_not_answer(world: World, tmp_path: Path, address: str) -> None:
    words = ("--output", f"oci:{tmp_path}/out", "-t", "x:1")
    done = world.image(*words, builder=address)
    assert done.code == 6
    assert address in done.err
    assert "no answer: Connection refused" in done.err or "no answer: No such file" in done.err
    assert "try: docker buildx ls" in done.err
    assert not list(tmp_path.iterdir())


def test_another_docker_engine_is_not_a_builder(world: World) -> None:
    world.near.run("context", "create", "other", "--docker", f"host={world.far.host}")
    try:
        done = world.image("--push", "-t", f"{world.registry}/no/thing:1", builder="other")
    finally:
        world.near.run("context", "rm", "other")
    assert done.code == 6, done.err
    assert "builder other is a Docker Engine" in done.err
    assert "DOCKER_HOST=" in done.err


def test_a_base_that_exists_only_on_this_machine(world: World) -> None:
    name = f"{world.registry}/only/here:1"
    Built(world.near)(name, "FROM scratch\nLABEL a=b\n")
    try:
        done = world.image("--push", "-t", f"{world.registry}/no/thing:1", base=name)
    finally:
        world.near.run("image", "rm", name)
    assert done.code == 8
    assert f"{name} is in the Docker Engine here, but builder {world.address}" in done.err
    assert "push it to a registry that the builder can reach" in done.err


def test_a_registry_that_refuses_the_push(world: World) -> None:
    done = world.image("--push", "-t", "127.0.0.1:9/no/thing:1")
    assert done.code == 8, done.err
    assert "pushing failed on builder" in done.err
    assert not done.out


def test_the_local_engine_exports_its_cache_too(world: World) -> None:
    """Without --builder: the Docker Engine's own, whichever builder buildx has in use."""
    world.near.run("buildx", "create", "--name", "inuse", "--driver", "remote", "--use",
                   "unix:///nonexistent/in-use.sock")  # fmt: skip
    place = f"{world.registry}/cache/near:1"
    words = ("image", "-l", "marlin", "-b", "pypi:vllm==0.20.1", "--engine", "buildkit", "-t")
    try:
        done = world.cli(*words, "near:2", "--no-verify", "--json", "--cache-to", place).ok()
        assert json.loads(done.out)["engine"] == "buildkit"
        world.near.run("image", "rm", "near:2")
        world.near.run("builder", "prune", "--all", "--force")
        again = world.cli(*words, "near:2", "--no-verify", "--json", "--cache-from", place).ok()
        assert {layer["cached"] for layer in again.json["layers"]} == {True}
        assert again.json["digest"] == done.json["digest"]
    finally:
        world.near.run("buildx", "rm", "inuse")
        for made in support.tags(world.near):
            world.near.run("image", "rm", "--force", made)
