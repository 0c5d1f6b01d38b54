"""Compiling in a toolkit image: what is asked of a builder, and what its answers come to.

The builder is replaced: scripts run on this machine, in a folder that stands for the container's
root.  ``tests/engine/test_toolkit.py`` has the real one.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.document import plain
from builder.common.paths import package_file
from builder.compile import command as compile_command
from builder.compile import executor as container_module
from builder.compile.executor import (
    Compilation,
    ContainerExecutor,
    ImageCompilers,
    Step,
    open_toolkit,
)
from builder.compile.host import NATIVE
from builder.errors import BuildFailed, EngineError, RemoteError, UsageError
from builder.images.engines import docker
from builder.images.engines.containers import Containers
from builder.images.engines.tasks import ROOT, PinnedImage, Task, TaskFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.unit.conftest import Called

DIGEST = "sha256:" + "ab" * 32
IMAGE = PinnedImage(ref="toolkit:1", digest=DIGEST, platform="linux/amd64")
TOOLKIT = ImageCompilers(
    nvcc="/usr/local/cuda/bin/nvcc",
    cuda="13.0",
    versions={"nvcc": "13.0.88", "host": "12.2.0"},
    library_headers=True,
)


class Here(Containers):
    """Containers that are folders of this machine; ``ran`` has the tasks of every run."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.ran: list[list[str]] = []
        self.away = False

    @property
    def elsewhere(self) -> bool:
        return self.away

    def resolve(self, ref: str, platform: str) -> PinnedImage:
        return replace(IMAGE, ref=ref, platform=platform)

    def run(
        self, image: PinnedImage, tasks: Sequence[Task], mounts: Mapping[str, Path], out: Path
    ) -> None:
        self.ran.append([task.name for task in tasks])
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        for name, folder in mounts.items():
            (self.root / name).symlink_to(folder)
        for task in tasks:
            done = subprocess.run(
                ["/bin/sh", "-c", task.script.replace(str(ROOT), str(self.root))],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise TaskFailed(done.returncode, done.stdout + done.stderr)
            shutil.copytree(self.root / "out" / task.name, out / task.name)


@pytest.fixture
def containers(tmp_path: Path) -> Here:
    return Here(tmp_path / "root")


def contained(containers: Containers, libraries: Path = Path()) -> ContainerExecutor:
    return ContainerExecutor(
        containers=containers, image=IMAGE, toolkit=TOOLKIT, libraries=libraries
    )


# --------------------------------------------------------------------------------- what is rendered


def test_jobs_limits_parallel_units(containers: Here) -> None:
    batch = [Compilation(path=f"csrc/{name}.cu", words=("nvcc",)) for name in "abc"]
    one, two, three = contained(containers).tasks(batch, 2)
    assert (one.after, two.after, three.after) == ("", "", "unit0")
    assert "nvcc -c /spark-build/source/csrc/c.cu -o /spark-build/out/unit2/object" in three.script
    text = containers.render("tool@kit", [one, two, three], ["source", "headers0"])
    assert (
        text == (Path(__file__).parents[2] / "unit" / "golden" / "compile.Dockerfile").read_text()
    )


def test_name_of_an_image_for_the_builder_and_in_a_plan() -> None:
    image = replace(IMAGE, ref=f"host/cuda:13@{DIGEST}")
    assert (image.name, image.exact) == ("host/cuda:13", f"host/cuda:13@{DIGEST}")
    container = replace(contained(Containers()), image=image)
    assert plain(container.planned) == {"image": "host/cuda:13", "digest": DIGEST}


# -------------------------------------------------------------------------- what an image must have

NVCC = """#!/bin/sh
case $1 in
  --version) echo "{said}" ;;
  --dryrun) echo '#$ LIBRARIES=  "-L{lib}/stubs" "-L{lib}"' ;;
esac
"""
RELEASE = "Cuda compilation tools, release 13.0, V13.0.88"
HOST = """#!/bin/sh
case $1 in
  -print-file-name=*) echo "@lib@/${1#*=}" ;;
  *) echo 'g++ (Debian 12.2.0-14) 12.2.0' ;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts compilers on PATH, which is what the image has."""
    names = ("mkdir", "readlink", "dirname", "sed", "tr", "cp", "sh")
    programs = {name: shutil.which(name) or "" for name in names}

    def put(
        nvcc: str = RELEASE, host: str = HOST, libraries: tuple[str, ...] = ("", ".13")
    ) -> None:
        made = tmp_path / "image"
        shutil.rmtree(made, ignore_errors=True)
        (made / "lib").mkdir(parents=True)
        (made / "lib" / "libc.so.6").write_text("a C library")
        for name in libraries:
            (made / "lib" / f"libcudart.so{name}").write_text("a library")
        for name, text in (("nvcc", NVCC.format(said=nvcc, lib=made / "lib")), ("g++", host)):
            if nvcc if name == "nvcc" else host:
                (made / name).write_text(text.replace("@lib@", str(made / "lib")))
                (made / name).chmod(0o755)
        for name, program in programs.items():
            (made / name).symlink_to(program)
        monkeypatch.setenv("PATH", str(made))

    return put


def test_an_image_is_inspected_once(containers: Here, tools: Callable[..., None]) -> None:
    tools()
    found = open_toolkit(containers, "toolkit:1", "linux/arm64")
    assert (found.toolkit.cuda, found.host) == ("13.0", NATIVE)
    assert found.toolkit.versions == {"nvcc": "13.0.88", "host": "12.2.0"}
    assert found.nvcc.name == "nvcc"
    assert not found.toolkit.library_headers
    assert (found.libraries / "libcudart.so.13").read_text() == "a library"
    assert found.c_library.read_text() == "a C library"
    assert open_toolkit(containers, "other:name", "linux/arm64").toolkit == found.toolkit
    assert containers.ran == [["probe"]], "the digest is the same"
    open_toolkit(containers, "toolkit:1", "linux/amd64")
    assert len(containers.ran) == 2, "another platform is another image"


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"nvcc": ""}, "has no nvcc, on PATH or at /usr/local/cuda/bin/nvcc"),
        ({"nvcc": "nothing of use"}, "has an nvcc that prints no release: 'nothing of use'"),
        ({"nvcc": RELEASE.replace("13.0", "12.9")}, r"has nvcc of CUDA 12\.9, but kernels for"),
        ({"host": ""}, r"has no g\+\+, which nvcc calls"),
        ({"libraries": ()}, r"has no libcudart\.so where "),
        ({"libraries": ("", ".12")}, r"has no libcudart\.so\.13 where "),
    ],
)
def test_an_image_that_lacks_something(
    containers: Here,
    tools: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    lacks: dict[str, Any],
    said: str,
) -> None:
    tools(**lacks)
    probe = package_file("data", "toolkit_probe.sh").read_text()  # this machine may have that one
    monkeypatch.setattr(
        container_module,
        "_probe",
        lambda: probe.replace("nvcc=/usr/local/cuda", "nvcc=/nonexistent"),
    )
    with pytest.raises(EngineError, match=said) as caught:
        open_toolkit(containers, "toolkit:1", "linux/amd64")
    assert caught.value.code == 6
    assert "toolkit:1 (sha256:abababababab)" in str(caught.value)
    assert "--toolkit nvidia/cuda:13" in caught.value.hint
    tools()
    open_toolkit(containers, "toolkit:1", "linux/amd64")
    assert len(containers.ran) == 2, "a refusal is not kept"


def test_an_image_that_cannot_be_inspected(
    containers: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TaskFailed(127, "sh: mkdir: not found")

    monkeypatch.setattr(containers, "run", broken)
    with pytest.raises(EngineError, match="could not be inspected: sh: mkdir: not found"):
        open_toolkit(containers, "toolkit:1", "linux/amd64")


# ---------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("output", "kind", "said"),
    [
        ("exec /bin/sh: exec format error\nexit code: 1", EngineError, "cannot run toolkit:1"),
        ("exec: /bin/sh: stat /bin/sh: no such file or directory", EngineError, "no /bin/sh"),
        ("executable file `/bin/sh` not found in $PATH", EngineError, "no /bin/sh"),
        ("unable to find user 0: invalid argument", EngineError, "no /bin/sh"),
        ("failed to resolve source metadata for x", RemoteError, "cannot pull toolkit:1@sha256"),
        ("failed to solve: no space left on device", BuildFailed, "failed on the Docker Engine"),
    ],
)
def test_errors_of_a_builder(output: str, kind: type[Exception], said: str) -> None:
    error = Containers()._failure(IMAGE, output, output, "")
    assert type(error) is kind
    assert said in str(error)
    assert error.hint or kind is BuildFailed  # type: ignore[attr-defined]


def test_a_failing_script_is_distinguished_from_a_failing_builder() -> None:
    output = 'process "/bin/sh /spark-build/run.sh" did not complete successfully: exit code: 137'
    error = Containers("farm")._failure(IMAGE, output, output, "Killed")
    assert isinstance(error, TaskFailed)
    assert (error.status, error.output) == (137, "Killed")


SAID = "a.cu(3): error: x is undefined\n1 error detected in the compilation\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TaskFailed(1, SAID), r"the compiler refused a unit:\n  a\.cu\(3\): error: x is undefined"),
        (TaskFailed(137, ""), "a compiler was killed on the Docker Engine"),
        (TaskFailed(1, "nvcc error: 'cicc' died\nKilled\n"), "too little memory"),
    ],
)
def test_a_unit_that_is_not_compiled(
    containers: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(containers, "run", fails)
    batch = [Compilation(path="a.cu", words=("nvcc",))]
    with pytest.raises(BuildFailed, match=said) as caught:
        contained(containers).compile(tmp_path, batch, 1, [])
    assert caught.value.code == 7
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_finished_units_are_not_compiled_again(containers: Here, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "source").mkdir(parents=True)
    for name in ("a", "b"):
        (work / "source" / f"{name}.cu").write_text(name)
    batch = [
        Compilation(path=f"{name}.cu", words=("sh", "-c", 'cp "$2" "$4"', "cc")) for name in "ab"
    ]
    container = contained(containers)
    assert set(container.compile(work, batch[:1], 1, [])) == {"a.cu.o"}
    assert set(container.compile(work, batch, 1, [])) == {"a.cu.o", "b.cu.o"}
    assert (work / "b.cu.o").read_text() == "b"
    assert containers.ran == [["unit0"], ["unit0"]]
    (work / "a.cu.o").unlink()
    container.compile(work, batch, 1, [])
    assert (work / "a.cu.o").read_text() == "a"
    assert len(containers.ran) == 3


def test_the_step_that_failed_is_named(containers: Here, tmp_path: Path) -> None:
    steps = [
        Step(words=("sh", "-c", "echo one >made"), failure="no first"),
        Step(words=("sh", "-c", "echo because >&2; exit 3"), failure="no second"),
        Step(words=("true",), failure="no third"),
    ]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "input").touch()
    container = contained(containers)
    with pytest.raises(BuildFailed, match=r"^no second: because$"):
        container.run(tmp_path / "folder", steps, ["made"])
    with pytest.raises(BuildFailed, match=r"^no files in the container: .*cp: .*inputs"):
        container.run(tmp_path / "absent", steps, ["made"])
    container.run(tmp_path / "folder", steps[:1], ["made"])
    assert (tmp_path / "folder" / "made").read_text() == "one\n"


# -------------------------------------------------------------------------------- which image it is


class FakeImage:
    """As much of the SDK's image as is asked."""

    def __init__(self, architecture: str, digests: list[str]) -> None:
        self.id = "sha256:" + "1d" * 32
        self.attrs = {"Id": self.id, "Architecture": architecture, "RepoDigests": digests}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeImage]:
    """A Docker Engine with images by name, and a client with buildx."""
    images: dict[str, FakeImage] = {}

    class Client:
        def close(self) -> None:
            pass

    def find(_: object, ref: str, platform: str, *, pull: bool = True) -> FakeImage:
        if ref not in images:
            raise RemoteError(f"image {ref} is not in the Docker Engine")
        return images[ref]

    monkeypatch.setattr(docker, "connect", Client)
    monkeypatch.setattr(docker, "find_image", find)
    monkeypatch.setattr(Containers, "_cli", None)
    return images


def test_a_tag_is_resolved_once(engine: dict[str, FakeImage]) -> None:
    engine["cuda:13"] = FakeImage("arm64", [f"cuda@{DIGEST}"])
    engine["mine:1"] = FakeImage("arm64", [])
    assert Containers().resolve("docker://cuda:13", "linux/arm64").digest == DIGEST
    assert Containers().resolve("mine:1", "linux/arm64").digest == engine["mine:1"].id
    again = Containers().resolve(f"mine:1@{engine['mine:1'].id}", "linux/arm64")
    assert again.ref == "mine:1", "it is here without its registry"
    with pytest.raises(RemoteError, match="is not in the Docker Engine"):
        Containers().resolve(f"mine:1@{DIGEST}", "linux/arm64")


def test_an_image_of_another_platform(engine: dict[str, FakeImage]) -> None:
    engine["cuda:13"] = FakeImage("amd64", [])
    with pytest.raises(EngineError, match="is for linux/amd64, but the target platform is") as e:
        Containers().resolve("cuda:13", "linux/arm64")
    assert e.value.code == 6
    assert "linux/arm64 with --toolkit" in e.value.hint


@pytest.mark.parametrize("ref", ["oci:some/dir", "pypi:vllm==0.20.1", "dir:/opt"])
def test_invalid_image_names(ref: str) -> None:
    with pytest.raises(UsageError, match="needs it in a registry or a Docker Engine"):
        Containers().resolve(ref, "linux/arm64")


def test_no_engine_and_no_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Containers, "_cli", None)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(
        EngineError, match="no Docker Engine is running at unix:///nonexistent"
    ) as e:
        Containers().resolve("cuda:13", "linux/arm64")
    assert "--builder" in e.value.hint


def test_no_client_with_buildx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="no docker client is on PATH, and compiling in a") as e:
        Containers().resolve("cuda:13", "linux/arm64")
    assert "leave --toolkit out" in e.value.hint


# -------------------------------------------------------------------------------------- the options

IMAGE_WORDS = ("image", "-l", "marlin", "-b", "pypi:vllm==0.20.1", "--toolkit", "cuda:13")
RUN = ("compile", "run", "--vllm", "0.19.1", "--change", "sm120-family")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (IMAGE_WORDS, "--toolkit cuda:13 has no effect without --compile"),
        ((*IMAGE_WORDS, "--compile", "--builder", "x y"), "neither the name of a builder"),
        (
            (*RUN, "--toolkit", "cuda:13", "--nvcc", "/n"),
            "--nvcc /n is a path on this machine, but",
        ),
    ],
)
def test_invalid_options(
    spark_build: Callable[..., Called],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(compile_command, "source_tree", lambda *_: None)
    result = spark_build(*words)
    assert result.code == 2
    assert said in result.err
