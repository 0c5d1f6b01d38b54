"""Compiling in containers of a toolkit image, on a real engine and on a builder elsewhere."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.compile.changes import SourceChange
from builder.compile.executor import Compilation, ContainerExecutor, Step, open_toolkit
from builder.compile.extensionwheel import build_extension_wheel
from builder.compile.link import InstalledLibraries
from builder.compile.toolchain import Compiler
from builder.errors import BuildFailed, Exit
from builder.images.engines.containers import Containers
from tests.compiled.test_extension_wheel_whole import FILES, objects, request_of  # noqa: F401 - fixtures

from . import machine, support, toolkit
from .bridge import buildkit_socket
from .cache import call
from .test_engine_errors import interrupt, until_gone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.compile.extensionwheel import WheelRequest

    from .machine import Engine, EngineTools, Registry
    from .support import Built, Cli

PLATFORM = "linux/amd64"
WHEEL = ("compile", "wheel", "--vllm", "0.19.1", "--change", "sm120-family", "--dry-run")
KERNEL = "csrc/kernel_sm120.cu"


@pytest.fixture(autouse=True)
def same_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process sees the engine, and nothing is left in it."""
    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, engine.env[name])
    before = support.containers(engine)
    yield
    assert not [name for name in support.tags(engine) if name.startswith("spark-build-base:")]
    assert support.containers(engine) == before


def inside(request: WheelRequest, container: ContainerExecutor, site: Path) -> WheelRequest:
    found = container.toolkit
    compiler = Compiler(
        nvcc=container.nvcc, cuda=found.cuda, versions=found.versions, container=container
    )
    tools = replace(request.tools, compiler=compiler)
    return replace(
        request, tools=tools, base=InstalledLibraries(DirTree(site), container.libraries)
    )


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc to compare with what an image compiles"
)
def test_the_wheel_equals_one_compiled_on_this_machine(
    request_of: WheelRequest,  # noqa: F811
    toolkit_image: str,
    tmp_path: Path,
) -> None:
    container = open_toolkit(Containers(), toolkit_image, PLATFORM)
    assert container.toolkit.versions["nvcc"] == "13.0.88"
    assert not container.alone, "the engine is on this machine, whose memory is known"
    there = inside(request_of, container, tmp_path / "site")
    made = build_extension_wheel(there, tmp_path / "there")
    local = build_extension_wheel(request_of, tmp_path / "local")
    one, other = made.report.companion, local.report.companion
    assert one.kernels == other.kernels
    assert one.kernels.instructions
    if one.compilers == other.compilers:
        assert made.path.read_bytes() == local.path.read_bytes()
    wrong = replace(
        there, change=SourceChange(name="cure", texts={KERNEL: b"int f() { return oops; }\n"})
    )
    with pytest.raises(BuildFailed, match=r'kernel_sm120.cu\(1\): error: identifier "oops"') as e:
        build_extension_wheel(wrong, tmp_path / "wrong")
    assert e.value.code == Exit.BUILD_FAILED
    assert not (tmp_path / "wrong").exists()


def test_a_plan_has_the_image_by_digest(cli: Cli, engine: Engine, toolkit_image: str) -> None:
    words = ("-l", "sm120-family", "-b", "pypi:vllm==0.19.1", "--platform", PLATFORM)
    here = {"SPARK_BUILD_BUILDER": None}
    done = cli("plan", *words, "--compile", "--toolkit", toolkit_image, "--json", env=here).ok()
    stage = done.json["layers"][0]["compile"]["stage"]
    known = support.inspect(engine, toolkit_image)
    assert stage["toolkit"]["image"] == toolkit_image
    digests = {name.partition("@")[2] for name in known["RepoDigests"]} or {known["Id"]}
    assert stage["toolkit"]["digest"] in digests
    assert stage["compilers"] == {"nvcc": "13.0.88", "host": "12.2.0"}


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM {image}\nRUN rm -rf /usr/local/cuda\n", "has no nvcc, on PATH or at"),
        ("FROM {image}\nRUN rm /usr/bin/g++\n", "has no g++, which nvcc calls"),
        ("FROM scratch\nWORKDIR /x\n", "has no /bin/sh"),
    ],
)
def test_an_image_that_lacks_something(
    cli: Cli, build: Built, toolkit_image: str, dockerfile: str, said: str
) -> None:
    image = build("lacking:1", dockerfile.format(image=toolkit_image))
    done = cli(*WHEEL, "--toolkit", image, "--json")
    assert (done.code, said in done.json["error"]["message"]) == (6, True), done.err
    assert "--toolkit" in done.json["error"]["hint"]


def test_an_image_for_another_platform(cli: Cli, toolkit_image: str) -> None:
    done = cli(*WHEEL, "--toolkit", toolkit_image, "--platform", "linux/arm64")
    assert done.code == 6
    assert f"{toolkit_image} is for linux/amd64, but the target platform is linux/arm64" in done.err


def test_an_image_that_does_not_exist(cli: Cli) -> None:
    done = cli(*WHEEL, "--toolkit", "127.0.0.1:9/no/thing:1")
    assert done.code == 8
    assert "127.0.0.1:9/no/thing:1 is not in the Docker Engine and cannot be pulled" in done.err


def test_interrupted(cli: Cli, engine: Engine, build: Built, toolkit_image: str) -> None:
    slow = "#!/bin/sh\\nexec sleep 54321\\n"
    text = f"FROM {toolkit_image}\nRUN rm -rf /usr/local/cuda; printf '{slow}' >/usr/bin/nvcc; "
    image = build("slow-toolkit:1", f"{text}chmod +x /usr/bin/nvcc\n")
    started = cli.start(*WHEEL, "--toolkit", image)
    said = interrupt(engine, started, "sleep 54321", signal.SIGINT, group=True)
    assert started.returncode == Exit.INTERRUPTED, said
    assert not until_gone(engine, "sleep 54321")


def test_a_remote_builder(
    engine: Engine, tools: EngineTools, registry: Registry, toolkit_image: str, tmp_path: Path
) -> None:
    """It takes the image out of the registry, by the digest that the tag has there.

    The builder is this engine's, which has those layers already: it need not fetch them.
    """
    layout = toolkit.toolkit_layout(machine.working_mmdebstrap(tools))
    name = f"{registry.address}/{toolkit.REPOSITORY}:1"
    words = ("copy", "--preserve-digests", "--dest-tls-verify=false", f"oci:{layout}")
    call(tools.program("skopeo"), *words, f"docker://{name}")
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    work = tmp_path / "work"
    for number in range(2):
        unit = work / "source" / f"unit{number}.cu"
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(f"__global__ void kernel{number}() {{}}\n")
    with buildkit_socket(engine, tmp_path) as address:
        container = open_toolkit(Containers(address), name, PLATFORM)
        assert container.image.digest == entry["digest"]
        assert container.alone, "nothing is known of the memory there"
        nvcc = (str(container.nvcc), "-Xcompiler", "-fPIC", "-arch=sm_121a")
        batch = [Compilation(path=f"unit{number}.cu", words=nvcc) for number in range(2)]
        assert set(container.compile(work, batch, 1, [])) == {"unit0.cu.o", "unit1.cu.o"}
        link = (*nvcc, "-shared", "unit0.cu.o", "unit1.cu.o", "-o", "both.so")
        container.run(work, [Step(words=link, failure="the linker refused")], ["both.so"])
    data = (work / "both.so").read_bytes()
    assert b"kernel0" in data
    assert b"kernel1" in data
