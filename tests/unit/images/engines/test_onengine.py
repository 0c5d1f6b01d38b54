"""The command line of a build in the local Docker Engine."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import EngineError
from builder.images.engines import buildkit, docker
from builder.images.engines.buildkit import BuildkitEngine
from builder.images.engines.buildx import BuildOutput, Cli, read_progress
from builder.images.engines.model import BuildRequest
from tests.unit.fakes import BACKEND, copy_op, fake_base, make_layer, make_plan_of, vllm_files

if TYPE_CHECKING:
    from builder.common.plan import BuildPlan

CLIS = {
    "buildx": Cli("docker", ("docker", "buildx", "build"), {}, (0, 13)),
    "an older client": Cli("docker", ("docker", "build"), {"DOCKER_BUILDKIT": "1"}),
}


def plan_of(kind: str) -> BuildPlan:
    """A plan for linux/arm64."""
    ref = "vllm/vllm-openai:v0.20.1" if kind == "image" else "pypi:vllm==0.20.1"
    base = fake_base(vllm_files(), kind, ref=ref, digest="sha256:" + "ab" * 32)
    return make_plan_of(base, make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n")))


def engine_with(patch: pytest.MonkeyPatch, cli: Cli, output: str = "", status: int = 0) -> Any:
    """The engine, and the words of each build that it is asked for."""
    asked: list[list[str]] = []

    def run(_cli: Cli, words: list[str], _env: object) -> BuildOutput:
        asked.append(list(words))
        return BuildOutput(status, read_progress(output), output)

    client = SimpleNamespace(
        close=lambda: None, images=SimpleNamespace(get=lambda _: SimpleNamespace(id="sha256:1"))
    )
    patch.setattr(buildkit, "run_build", run)
    patch.setattr(docker, "connect", lambda: client)
    patch.setattr(docker, "pinned", lambda *_: contextlib.nullcontext("spark-build-base:1"))
    engine = BuildkitEngine()
    vars(engine).update(_cli=cli, _links=True)
    return engine, asked


@pytest.mark.parametrize("kind", ["image", "pypi"])
@pytest.mark.parametrize("cli", CLIS)
def test_the_platform_is_that_of_the_base(
    monkeypatch: pytest.MonkeyPatch, kind: str, cli: str
) -> None:
    """Without it BuildKit looks for this machine's platform in the base."""
    engine, asked = engine_with(monkeypatch, CLIS[cli])
    plan = plan_of(kind)
    assert plan.base.platform.oci == "linux/arm64"
    engine.build(BuildRequest(plan=plan, tag="x:1"))
    (words,) = asked
    assert words[words.index("--platform") + 1] == "linux/arm64"


def test_an_engine_that_cannot_run_the_platform_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "exec /bin/sh: exec format error\n"
    engine, _ = engine_with(monkeypatch, CLIS["buildx"], output, 1)
    with pytest.raises(EngineError, match="cannot run programs of linux/arm64") as caught:
        engine.build(BuildRequest(plan=plan_of("image"), tag="x:1"))
    assert caught.value.hint == "--engine oci"
