"""The mod in containers that sparkrun and spark-vllm-docker start: twice, shared, and offline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.sources import VENDORED
from builder.common.programs import DISPATCH, IN_CONTAINER

from . import base, cache, support
from .clients import USER, Sparkrun, eugr_container
from .countindex import CountingIndex
from .support import LINEAR, MOD, MODS, MOE, Cli, Done

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Engine

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "sparkrun" / "nemotron-3-super.yaml"
#: The one of these two distributions that has a wheel for each machine and Python.
NATIVE = "nvidia-cutlass-dsl-libs-cu13==4.4.2"
#: What the mod takes whole from the index on the release of the base image.
WHOLE = ("flashinfer_python-0.6.9-", f"{NATIVE.replace('-', '_').replace('==', '-')}-")


@pytest.fixture
def index() -> Iterator[CountingIndex]:
    with CountingIndex() as counting:
        yield counting


@pytest.fixture
def users() -> Iterator[Path]:
    """A folder of the user's, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="spark-build-user-") as name:
        folder = Path(name)
        shutil.chown(folder, USER, USER)
        yield folder


@pytest.fixture
def sparkrun(engine: Engine, base_image: str, users: Path, tmp_path: Path) -> Sparkrun:
    """With an empty runtime cache, which belongs to the user."""
    return Sparkrun(engine, base_image, RECIPE, users / "cache", tmp_path)


@pytest.fixture(scope="session")
def vendored(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mods export --vendor` of the release of the base image.

    It brings wheels of a DGX Spark, arm64 and Python 3.12; the base image takes another file of
    the one distribution that is not for all machines.
    """
    folder = tmp_path_factory.mktemp("vendored")
    release = base.requirements()["vllm"]
    cli("mods", "export", MOD, "--vendor", release, "--in", folder).ok()
    (own,) = cache.entry(f"native-wheel/{cache.key(NATIVE, base.SITE)}", native_wheel).iterdir()
    shutil.copy(own, folder / MOD / VENDORED / own.name)
    return folder / MOD


def native_wheel(folder: Path) -> None:
    """Download the wheel of `NATIVE` for this machine and the Python of the base image."""
    python = base.SITE.split("/python")[1].partition("/")[0]
    words = ("--no-deps", "--only-binary=:all:", f"--python-version={python}", "--dest", folder)
    cache.call(sys.executable, "-m", "pip", "download", "--quiet", NATIVE, *words)


def probed(engine: Engine, held: str, *options: str) -> list[list[str]]:
    """The lines that vLLM says for linear layers and for MoE, in a container."""
    engine.run("cp", DISPATCH.file(), f"{held}:{IN_CONTAINER}")
    asks = [{"kind": "nvfp4-linear"}, {"kind": "nvfp4-moe", "moe_backend": "flashinfer_b12x"}]
    words = ("exec", "-i", *options, held, "python3", "-B", IN_CONTAINER)
    answer = subprocess.run(
        [engine.docker, *words], input=json.dumps({"ask": asks}), env=engine.env, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    result = json.loads(answer.stdout)
    assert result["fatal"] is None
    return [one["lines"] for one in result["answers"]]


def shell(engine: Engine, held: str, line: str) -> Done:
    """A line in a container, as the user whose server runs in it."""
    done = subprocess.run(
        [engine.docker, "exec", held, "bash", "-c", line], env=engine.env, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def settled(engine: Engine, held: str) -> support.Tree:
    """Site-packages, but for the lock of the applier."""
    return support.without(support.stamps(engine, held), ".spark-build")


def written(engine: Engine, held: str) -> dict[str, str]:
    """Path -> sha256 of each file that the mod wrote, as its last layer left it."""
    show = "import glob, json; print(json.dumps([json.load(open(p)) for p in glob.glob('*.json')]))"
    folder = f"--workdir={base.SITE}/.spark-build/receipts"
    receipts = json.loads(engine.run("exec", folder, held, "python3", "-c", show))
    receipts.sort(key=lambda receipt: receipt["sequence"])
    assert receipts
    return {path: file["after"] for one in receipts for path, file in one["files"].items()}


def fetched_once(index: CountingIndex) -> bool:
    """Whether each whole wheel was fetched one time."""
    return sorted(name.startswith(WHOLE) for name in index.whole) == [True] * len(WHOLE)


def test_sparkrun_serves_as_user_1000_what_the_mod_patched(
    sparkrun: Sparkrun, index: CountingIndex
) -> None:
    """Hooks run as root, the server does not: it must be able to read what they wrote."""
    engine = sparkrun.engine
    with sparkrun.container({"PIP_INDEX_URL": index.index}) as first:
        made = json.loads(engine.run("inspect", first))[0]
        assert made["Config"]["User"] == f"{USER}:{USER}"
        assert "no-new-privileges" in made["HostConfig"]["SecurityOpt"]
        assert not made["HostConfig"]["Privileged"]
        sparkrun.mod(first, MODS / MOD).ok()
        linear, moe = probed(engine, first)
        assert LINEAR in linear
        assert any(line.startswith(MOE) for line in moe)
        assert engine.run("exec", first, "id", "-u").strip() == str(USER)
        before, asked = settled(engine, first), index.requests
        sparkrun.mod(first, MODS / MOD).ok()
        assert not support.differences(settled(engine, first), before)
        assert index.requests == asked, "a second run needs no network"
        patched = written(engine, first)
    assert fetched_once(index)
    with sparkrun.container({"PIP_INDEX_URL": index.index}) as second:
        sparkrun.mod(second, MODS / MOD).ok()
        assert written(engine, second) == patched
    assert index.requests == asked, "the runtime cache has it all"
    words = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "rm", "-r")
    cache.call(*words, sparkrun.cache)  # what root wrote there is the user's, who prunes the cache


def test_user_1000_cannot_patch_files_of_root(sparkrun: Sparkrun, vendored: Path) -> None:
    """Nothing is pretended: it says whose the files are; where nothing is needed, all is well."""
    engine = sparkrun.engine
    with sparkrun.container({}, network="none") as held:
        engine.run("exec", "--user=root", held, "mkdir", "-p", "/workspace/mods")
        engine.run("cp", vendored, f"{held}:/workspace/mods/")
        inside = f"cd /workspace/mods/{MOD} && ./run.sh"
        before = support.stamps(engine, held)
        done = shell(engine, held, inside)
        assert done.code == 2
        said = f"error: {base.SITE}: cannot write (it is uid 0's, and this is {USER}), and it lacks"
        assert f"{said} cutlass-dsl-cu13, " in done.err
        assert "try: run this as that user (docker exec --user 0), or use an image" in done.err
        assert not support.differences(support.stamps(engine, held), before)
        sparkrun.mod(held, vendored).ok()
        again = shell(engine, held, inside).ok()
        assert "applied        vllm-b12x-backend: receipt found" in again.err


def test_the_mod_changes_nothing_in_our_image(
    sparkrun: Sparkrun, patched: str, engine: Engine
) -> None:
    """A recipe may ask for the mod and an image that has its layers."""
    with replace(sparkrun, image=patched).container({}, network="none") as held:
        before = settled(engine, held)
        sparkrun.mod(held, MODS / MOD).ok()
        assert not support.differences(settled(engine, held), before)
        done = shell(engine, held, f"cd /workspace/mods/{MOD} && ./run.sh").ok()
        assert "needed" not in done.err


def test_sparkrun_runs_a_vendored_mod_without_network(sparkrun: Sparkrun, vendored: Path) -> None:
    with sparkrun.container({}, network="none") as held:
        failed = sparkrun.mod(held, MODS / MOD)
        assert failed.code == 1
        assert "error: cannot fetch" in failed.err
        sparkrun.mod(held, vendored).ok()
        assert LINEAR in probed(sparkrun.engine, held)[0]


def test_spark_vllm_docker_downloads_once_for_two_containers(
    engine: Engine, base_image: str, index: CountingIndex, users: Path
) -> None:
    env = {"PIP_INDEX_URL": index.index}
    with eugr_container(engine, base_image, users / "vllm", env) as first:
        first.copy(MODS / MOD)
        assert "downloading" in first.run(MOD).ok().err
        assert fetched_once(index)
        before, asked = settled(engine, first.held), index.requests
        assert "needed" not in first.run(MOD).ok().err
        patched = written(engine, first.held)
        assert not support.differences(settled(engine, first.held), before)
    with eugr_container(engine, base_image, users / "vllm", env) as second:
        second.copy(MODS / MOD)
        done = second.run(MOD).ok()
        assert "needed         cutlass-dsl-cu13:" in done.err
        assert "downloading" not in done.err
        assert written(engine, second.held) == patched
    assert index.requests == asked


def test_spark_vllm_docker_runs_a_vendored_mod_without_network(
    engine: Engine, base_image: str, vendored: Path, users: Path
) -> None:
    with eugr_container(engine, base_image, users / "vllm", {}, network="none") as held:
        held.copy(MODS / MOD)
        assert held.run(MOD).code == 8
        held.copy(vendored)
        assert "downloading" not in held.run(MOD).ok().err
        assert LINEAR in probed(engine, held.held)[0]
    assert not list((users / "vllm").rglob("*.whl")), "what it brings is not copied again"
