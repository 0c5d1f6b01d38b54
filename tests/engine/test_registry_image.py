"""Images patched where they lie, in a real registry, by the oci engine: no Docker Engine, no pull.

Then Docker, skopeo and the image's own verifier say what they think of the result.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import pytest

from builder.images.registry.client import Registry as Client
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from tests.countproxy import CountProxy

from . import base, cache, machine, support
from .support import LINEAR, PROFILE, Built, Cli, Done

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.images.registry.client import Repository

#: Nobody answers there, so that nothing can be done by an engine behind our back.
NO_ENGINE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
#: More than manifests, configurations and requests take; far less than any layer of the base.
FEW_BYTES = 100_000

#: A base whose packages are not root's, with odd folders, compiled files that are stale, links and
#: a distribution that goes: what a COPY does not keep by itself.
ODD = f"""\
FROM {{base}}
RUN chown -R 1000:1000 {base.SITE}/vllm/config {base.SITE}/flashinfer/gemm \\
 && chmod 2775 {base.SITE}/vllm/config && chmod 600 {base.SITE}/vllm/envs.py \\
 && mkdir -p {base.SITE}/vllm/config/__pycache__ /data/work \\
 && echo old > {base.SITE}/vllm/config/__pycache__/kernel.cpython-39.pyc \\
 && chmod 1777 /data/work && ln -s /data/work /workspace \\
 && rm -rf {base.SITE}/flashinfer_cubin-*.dist-info/licenses
"""


@dataclass(frozen=True)
class Published:
    """The base in a registry behind a counting proxy, and what was built there."""

    proxy: CountProxy
    base: str
    first: Done
    read_first: int
    done: Done
    sent: int
    received: int

    @property
    def pinned(self) -> str:
        """Name, tag and digest of the patched image."""
        return f"{self.done.json['image']}@{self.done.json['digest']}"


def repository(address: str, name: str) -> Repository:
    return Client(address).repository(name)


@pytest.fixture(scope="module")
def proxy(registry: machine.Registry) -> Iterator[CountProxy]:
    with CountProxy(registry.address) as running:
        yield running


@pytest.fixture(scope="module")
def remote_base(proxy: CountProxy, tools: machine.EngineTools) -> str:
    """The base image in the registry."""
    layout = LayoutDirectory(machine.base_layout(tools))
    copy_image(layout, "", repository(proxy.address, "base/vllm"), "test")
    return f"{proxy.address}/base/vllm:test"


@pytest.fixture(scope="module")
def published(cli: Cli, proxy: CountProxy, remote_base: str) -> Published:
    """Planned once, then built and pushed, without an engine."""
    proxy.take()
    name = f"docker://{remote_base}"
    first = cli("plan", "-l", PROFILE, "-b", name, "--json", env=NO_ENGINE).ok()
    _, read_first = proxy.take()
    tag = f"{proxy.address}/team/vllm:patched"
    words = ("image", "-l", PROFILE, "-b", name, "--push", "--tag", tag, "--json")
    done = cli(*words, env=NO_ENGINE).ok()
    sent, received = proxy.take()
    return Published(proxy, remote_base, first, read_first, done, sent, received)


# ------------------------------------------------------------------------------ what it cost


def test_the_base_is_read_once_and_never_sent(published: Published) -> None:
    layers = support.layout_manifest(machine.base_layout(machine.ensure_engine()))[1]["layers"]
    size = sum(layer["size"] for layer in layers)
    assert published.read_first < size + FEW_BYTES
    assert published.received < FEW_BYTES, "the layers are known by their digests"
    assert published.sent < published.done.json["added_bytes"] + FEW_BYTES


def test_a_known_base_is_not_read_again(cli: Cli, published: Published) -> None:
    published.proxy.take()
    words = ("plan", "-l", PROFILE, "-b", f"docker://{published.base}", "--json")
    again = cli(*words, env=NO_ENGINE).ok()
    assert sum(published.proxy.take()) < FEW_BYTES
    assert again.json == published.first.json
    assert again.json["plan_digest"] == published.done.json["plan_digest"]


def test_pushing_again_sends_nothing(cli: Cli, published: Published) -> None:
    published.proxy.take()
    tag = published.done.json["image"]
    words = ("image", "-l", PROFILE, "-b", f"docker://{published.base}", "--push", "--tag", tag)
    again = cli(*words, "--no-verify", env=NO_ENGINE).ok()
    assert again.last == published.pinned
    assert published.proxy.take()[0] < FEW_BYTES


def test_blobs_of_the_base_are_the_same(published: Published) -> None:
    address = published.proxy.address
    was = repository(address, "base/vllm").manifest("test").json()
    now = repository(address, "team/vllm").manifest("patched").json()
    assert now["layers"][: len(was["layers"])] == was["layers"]
    needed = [layer for layer in published.first.json["layers"] if layer["state"] == "needed"]
    with_metadata = len(needed) + 1
    assert len(now["layers"]) == len(was["layers"]) + with_metadata


# ------------------------------------------------------------------------- what others make of it


def test_it_is_verified_in_its_registry(published: Published) -> None:
    report = published.done.json["verify"]
    assert report["passed"] is True
    assert report["not_run"] == 0, report["checks"][-1]["reason"]
    linear = next(c for c in report["checks"] if c["name"] == "nvfp4-linear")
    assert linear["seen"] == LINEAR


def test_it_verifies_by_its_digest(cli: Cli, published: Published) -> None:
    words = ("verify", f"docker://{published.pinned}", "--level", "static,imports")
    done = cli(*words, env=NO_ENGINE).ok()
    assert " 0 fail, 0 not run" in done.err


def test_the_unpatched_base_does_not_verify(cli: Cli, published: Published) -> None:
    words = ("verify", f"docker://{published.base}", "-l", PROFILE, "--level", "static", "--json")
    done = cli(*words, env=NO_ENGINE)
    assert done.code == 5
    assert "static layer vllm-b12x-backend" in done.checks("fail")


def test_docker_pulls_and_runs_it(
    engine: machine.Engine, base_image: str, published: Published
) -> None:
    name = published.pinned
    engine.run("pull", "--quiet", name)
    try:
        assert support.inspect(engine, name)["Id"] == published.done.json["digest"]
        words = ("run", "--rm", "--network=none", "--entrypoint", "spark-verify", name)
        said = engine.run(*words)
        assert "FAIL" not in said
        assert f"PASS    dispatch nvfp4-linear: {LINEAR}" in said
    finally:
        engine.run("image", "rm", "--force", name)


def test_skopeo_copies_it_and_finds_nothing_wrong(
    tools: machine.EngineTools, published: Published
) -> None:
    """Skopeo checks digests, diff_ids and that configuration and layers fit together."""
    skopeo = tools.program("skopeo")
    name = f"docker://{published.done.json['image']}"
    shown = json.loads(cache.call(skopeo, "inspect", "--tls-verify=false", name))
    assert shown["Digest"] == published.done.json["digest"]
    with cache.scratch("skopeo") as folder:
        words = ("copy", "--quiet", "--src-tls-verify=false", name, f"oci:{folder}/copy:x")
        cache.call(skopeo, *words)
        (entry,) = json.loads((folder / "copy/index.json").read_text())["manifests"]
        assert entry["digest"] == published.done.json["digest"]


# -------------------------------------------------------------------- two ways to ask, and to build


def test_every_source_gives_the_same_plan(
    cli: Cli, engine: machine.Engine, base_image: str, published: Published
) -> None:
    engine.run("pull", "--quiet", published.base)
    try:
        asked = cli("plan", "-l", PROFILE, "-b", published.base, "--json").ok()
    finally:
        engine.run("image", "rm", published.base)
    assert asked.json == published.first.json


#: Of everything in an image: kind, mode, owner, and what is in it.
Facts = dict[str, tuple[str, int, int, int, str]]


def facts_of_tar(stream: IO[bytes]) -> Facts:
    facts: Facts = {}
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            kind = {tarfile.REGTYPE: "file", tarfile.DIRTYPE: "dir"}.get(member.type, "link")
            held = member.linkname
            if member.isreg():
                data = tar.extractfile(member)
                assert data is not None
                held = hashlib.file_digest(cast("Any", data), "sha256").hexdigest()
            mode = 0 if kind == "link" else member.mode
            facts[member.name.strip("/")] = (kind, mode, member.uid, member.gid, held)
    return facts


def facts_of(engine: machine.Engine, image: str) -> Facts:
    """The whole tree of an image, as `docker export` gives it."""
    held = engine.run("create", "--network=none", image, "true").strip()
    try:
        with subprocess.Popen(
            [engine.docker, "export", held], env=engine.env, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            facts = facts_of_tar(process.stdout)
        assert process.returncode == 0
    finally:
        engine.run("rm", held)
    return facts


def tree_hash(facts: Facts) -> str:
    """One hash over paths, kinds, modes, owners, contents and link targets."""
    lines = (json.dumps([path, *entry]) for path, entry in sorted(facts.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.fixture(scope="module")
def odd_base(engine: machine.Engine, base_image: str, proxy: CountProxy) -> Iterator[str]:
    """A base that a COPY would not leave as it is, in the engine and in the registry."""
    name = f"{proxy.address}/base/odd:1"
    build = Built(engine)
    build(name, ODD.format(base=base_image))
    engine.run("push", "--quiet", name)
    yield name
    build.remove()


def test_both_engines_give_the_same_tree(
    cli: Cli, engine: machine.Engine, odd_base: str, proxy: CountProxy
) -> None:
    words = ("image", "-l", PROFILE, "--no-verify", "--json")
    by_buildkit = cli(*words, "-b", odd_base, "--engine", "buildkit", "-t", "tree:buildkit").ok()
    tag = f"{proxy.address}/tree:oci"
    by_oci = cli(*words, "-b", f"docker://{odd_base}", "--push", "-t", tag, env=NO_ENGINE).ok()
    assert by_buildkit.json["plan_digest"] == by_oci.json["plan_digest"]
    try:
        engine.run("pull", "--quiet", tag)
        trees = [facts_of(engine, name) for name in ("tree:buildkit", tag)]
    finally:
        engine.run("image", "rm", "--force", "tree:buildkit", tag)
    differs = {p for p in trees[0].keys() | trees[1].keys() if trees[0].get(p) != trees[1].get(p)}
    assert not {p: (trees[0].get(p), trees[1].get(p)) for p in sorted(differs)[:10]}
    assert tree_hash(trees[0]) == tree_hash(trees[1])
    site = base.SITE.strip("/")
    assert trees[1][f"{site}/vllm/config"][1:4] == (0o2775, 1000, 1000)
    assert trees[1][f"{site}/vllm/config/kernel.py"][2:4] == (1000, 1000)
    assert trees[1][f"{site}/vllm/envs.py"][1] == 0o600
    stale = "vllm/config/__pycache__/kernel.cpython-39.pyc"
    assert f"{site}/{stale}" not in trees[1]
    assert support.script(engine, odd_base, f"cat {base.SITE}/{stale}") == "old\n"
    assert trees[1]["workspace"] == ("link", 0, 0, 0, "/data/work")
    assert trees[1]["data/work"][1] == 0o1777


# -------------------------------------------------------------------------------- other places


def test_another_registry_gets_the_missing_blobs(
    cli: Cli, tools: machine.EngineTools, published: Published
) -> None:
    with machine.Registry(tools) as other, CountProxy(other.address) as counted:
        tag = f"{counted.address}/far/vllm:1"
        words = ("image", "-l", PROFILE, "-b", f"docker://{published.base}", "--push", "-t", tag)
        done = cli(*words, "--no-verify", env=NO_ENGINE).ok()
        assert done.last == f"{tag}@{published.done.json['digest']}"
        sent, _ = counted.take()
        layers = repository(counted.address, "far/vllm").manifest("1").json()["layers"]
        assert sum(layer["size"] for layer in layers) < sent
        cli(*words, "--no-verify", env=NO_ENGINE).ok()
        assert counted.take()[0] < FEW_BYTES


def test_a_docker_engine_loads_it_under_its_digest(
    cli: Cli, engine: machine.Engine, base_image: str, published: Published
) -> None:
    words = ("image", "-l", PROFILE, "-b", f"docker://{published.base}", "--output", "docker")
    done = cli(*words, "-t", "loaded:1", "--engine", "oci", "--no-verify", "--json").ok()
    try:
        assert done.json["digest"] == published.done.json["digest"]
        assert support.inspect(engine, "loaded:1")["Id"] == published.done.json["digest"]
        run = ("run", "--rm", "--network=none", "--entrypoint", "spark-verify", "loaded:1")
        assert "FAIL" not in engine.run(*run)
    finally:
        engine.run("image", "rm", "--force", "loaded:1")


def test_buildx_bakes_what_was_written(
    cli: Cli, engine: machine.Engine, published: Published
) -> None:
    with cache.scratch("bake") as folder:
        words = ("bake", "-l", PROFILE, "-b", f"docker://{published.base}", "-o", folder / "out")
        done = cli(*words, "--tag-prefix", "baked", "--json", env=NO_ENGINE).ok()
        (target,) = done.json["targets"]
        assert target["plan_digest"] == published.done.json["plan_digest"]
        subprocess.run(
            [engine.docker, "buildx", "bake", "--load"],
            cwd=folder / "out", env=engine.env, check=True,
        )  # fmt: skip
    try:
        cli("verify", target["tags"][0], "--level", "static").ok()
        labels = support.inspect(engine, target["tags"][1])["Config"]["Labels"]
        assert target["plan_digest"] in labels.values()
    finally:
        engine.run("image", "rm", "--force", *target["tags"])


def test_a_full_layout_is_whole_and_verifies(
    cli: Cli, tools: machine.EngineTools, published: Published
) -> None:
    with cache.scratch("full-layout") as folder:
        target = f"oci:{folder}/out"
        words = ("image", "-l", PROFILE, "-b", f"docker://{published.base}", "--output", target)
        done = cli(*words, "--no-verify", "--json", env=NO_ENGINE).ok()
        assert done.json["digest"] == published.done.json["digest"]
        cli("verify", target, "--level", "static", env=NO_ENGINE).ok()
        copied = f"oci:{folder}/copy:x"
        cache.call(tools.program("skopeo"), "copy", "--quiet", target, copied)
