"""The infrastructure itself is real: without that, no other test here proves anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import pytest

from . import base, cache, debs, machine, ocilayout

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCKERFILE = """\
FROM {base}
RUN <<EOF
echo heredoc > /heredoc.txt
EOF
COPY --link marker.txt /opt/marker.txt
"""


@pytest.fixture
def probe(engine: machine.Engine, base_image: str, tmp_path: Path) -> Iterator[str]:
    """A small image on the base, built by BuildKit."""
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.format(base=base_image))
    (tmp_path / "marker.txt").write_text("linked\n")
    engine.run("buildx", "build", "--network=none", "--load", "--tag", "probe:1", tmp_path)
    yield "probe:1"
    engine.run("image", "rm", "probe:1")


def in_container(engine: machine.Engine, image: str, *command: str) -> str:
    words = ("run", "--rm", "--network=none", "--entrypoint", command[0], image, *command[1:])
    return engine.run(*words)


def test_engine_and_buildx_answer(engine: machine.Engine) -> None:
    version = engine.run("version", "--format", "{{.Server.Version}}")
    assert int(version.split(".")[0]) >= machine.OLDEST_ENGINE
    assert "buildx" in engine.run("buildx", "version")


def test_plain_docker_and_the_sdk_reach_the_same_engine(engine: machine.Engine) -> None:
    command = ["sh", "-c", "command -v docker && docker info --format '{{.ID}}'"]
    found, identity = cache.call(*command, env=engine.env).split()
    assert found == engine.docker
    client = docker.from_env(environment=engine.env)
    try:
        assert client.info()["ID"] == identity
    finally:
        client.close()


def test_builds_with_heredoc_and_linked_copy(engine: machine.Engine, probe: str) -> None:
    said = in_container(engine, probe, "cat", "/heredoc.txt", "/opt/marker.txt")
    assert said == "heredoc\nlinked\n"


def test_push_and_pull(engine: machine.Engine, registry: machine.Registry, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY --link marker.txt /\n")
    (tmp_path / "marker.txt").write_text("pushed\n")
    target = f"{registry.address}/probe:1"
    engine.run("buildx", "build", "--load", "--tag", target, tmp_path)
    engine.run("push", target)
    engine.run("image", "rm", target)
    engine.run("pull", target)
    skopeo = engine.tools.program("skopeo")
    seen = json.loads(
        cache.call(skopeo, "inspect", "--tls-verify=false", f"docker://{target}", env=engine.env)
    )
    digests = engine.run("image", "inspect", "--format", "{{json .RepoDigests}}", target)
    assert seen["Digest"] in digests
    engine.run("image", "rm", target)


def test_base_image_contains_the_released_packages(engine: machine.Engine, base_image: str) -> None:
    script = (
        "import importlib.metadata as m, json\n"
        "import vllm, vllm.model_executor.kernels.linear as kernels\n"
        f"versions = {{name: m.version(name) for name in {list(base.requirements())}}}\n"
        "print(json.dumps([vllm.__version__, kernels.__file__, versions]))\n"
    )
    said = in_container(engine, base_image, "python3", "-c", script)
    version, file, versions = json.loads(said.splitlines()[-1])
    assert version == base.requirements()["vllm"]
    assert file == f"{base.SITE}/vllm/model_executor/kernels/linear/__init__.py"
    assert versions.items() <= base.requirements().items()


def test_base_image_matches_a_pip_install(engine: machine.Engine, base_image: str) -> None:
    script = (
        "import base64, csv, hashlib, importlib.metadata as m, pathlib\n"
        "files = [f for f in m.distribution('vllm').files]\n"
        "bad = [str(f) for f in files if f.hash and f.hash.value != base64.urlsafe_b64encode(\n"
        "    hashlib.new(f.hash.mode, f.locate().read_bytes()).digest()).rstrip(b'=').decode()]\n"
        "print(len(files), bad, any(f.suffix == '.pyc' and f.locate().exists() for f in files))\n"
    )
    count, bad, bytecode = in_container(engine, base_image, "python3", "-c", script).split()
    assert int(count) > 2000
    assert (bad, bytecode) == ("[]", "True")


def test_base_image_starts_like_the_official_ones(engine: machine.Engine, base_image: str) -> None:
    config = json.loads(engine.run("image", "inspect", base_image))[0]["Config"]
    assert config["Entrypoint"] == ["vllm", "serve"]
    assert in_container(engine, base_image, "sh", "-c", "command -v vllm").strip() == (
        "/usr/local/bin/vllm"
    )


def test_second_start_installs_nothing(
    engine: machine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("went to the package archive again")

    monkeypatch.setattr(debs, "unpack", refuse)
    monkeypatch.setattr(debs, "install", refuse)
    assert machine.ensure_engine() == engine.tools
    assert machine.base_layout(engine.tools).name == base.reference().rpartition(":")[2]


def test_layout_lists_its_contents(engine: machine.Engine, base_image: str) -> None:
    layout = machine.base_layout(engine.tools)
    names = {path.name for path in ocilayout.archive_members(layout)}
    index = json.loads((layout / "index.json").read_text())
    assert index["manifests"][0]["digest"].partition(":")[2] in names


ORPHAN = """\
import pathlib, sys, time
sys.path.insert(0, {parent!r})
from {package} import machine
machine.cache.root = lambda: pathlib.Path({cache!r})
with machine.Engine(machine.EngineTools(**{tools!r})) as engine:
    print(engine._work, flush=True)
    time.sleep(600)
"""


def test_a_killed_run_leaves_no_engine(engine: machine.Engine, tmp_path: Path) -> None:
    package = __package__ or ""
    parent = Path(__file__).resolve().parents[package.count(".") + 1]
    script = ORPHAN.format(
        parent=str(parent), package=package, cache=str(tmp_path), tools=vars(engine.tools)
    ).replace("PosixPath", "pathlib.Path")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        work = run.stdout.readline().strip()
        assert machine._family(work)
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + machine.STOP_TIMEOUT
    while machine._family(work) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not machine._family(work)
    cache.remove_tree(Path(work))
