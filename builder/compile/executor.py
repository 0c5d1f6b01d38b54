"""The compilers and linkers of this machine, or of a toolkit image, and how they are run.

Both have the same interface: run commands on files, and return the outputs.  All paths in a
container are fixed, so objects do not depend on the local machine.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.console import console
from builder.common.files import write_atomically
from builder.common.leftovers import making
from builder.common.paths import cache_dir, package_file
from builder.common.plan import ToolkitImage
from builder.compile.host import NATIVE, HostCompiler
from builder.errors import BuildFailed, EngineError
from builder.images.engines.tasks import ROOT, PinnedImage, Task, TaskFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.images.engines.containers import Containers


# --------------------------------------------------------------------------------------------- nvcc


#: Folder of nvcc from the toolkit's packages.
_USUAL = Path("/usr/local/cuda/bin/nvcc")


def find_nvcc(named: Path | None = None) -> tuple[Path, str]:
    """Find nvcc and its CUDA version.

    Raises:
        EngineError: it is missing, or its version is unknown.
    """
    nvcc = named or installed_nvcc()
    if nvcc is None or not nvcc.is_file():
        raise EngineError(
            f"no nvcc {f'at {named}' if named else f'on PATH or at {_USUAL}'}",
            hint="install the CUDA toolkit 13, or name its compiler with --nvcc, or an image that "
            "has it with --toolkit",
        )
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"{nvcc} does not run here: {error.strerror}") from None
    release = release_in(done.stdout)
    if not release:
        version_output = (done.stdout + done.stderr)[:200]
        raise EngineError(f"{nvcc} --version printed no release: {version_output!r}")
    return nvcc, release


def release_in(output: str) -> str:
    """The CUDA release in the output of ``nvcc --version``, such as ``13.0``, or ``""``."""
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else ""


def version_in(output: str) -> str:
    """The exact version in a compiler's output, such as ``13.0.88``."""
    match = re.search(r"\bV(\d+\.\d+\.\d+)|\b(\d+\.\d+\.\d+)\b", output)
    return (match[1] or match[2]) if match else "unknown"


def installed_nvcc() -> Path | None:
    """nvcc on PATH, or in the toolkit packages' folder; None if missing."""
    nvcc = Path(shutil.which("nvcc") or _USUAL)
    return nvcc if nvcc.is_file() else None


def compiler_versions(nvcc: Path | None, host: HostCompiler = NATIVE) -> dict[str, str]:
    """The exact versions of nvcc, if given, and of the host compiler.

    A cross compiler's name is included, because it may compile differently.
    """
    versions = {}
    for name, word in (("nvcc", nvcc), ("host", host.command)):
        if word is None:
            continue
        done = subprocess.run([word, "--version"], capture_output=True, text=True, check=False)
        versions[name] = version_in(done.stdout)
    if host != NATIVE:
        versions["host"] = f"{host.command} {versions['host']}"
    return versions


def has_library_headers(nvcc: Path) -> bool:
    """Whether nvcc's toolkit also has the library headers."""
    root = nvcc.resolve().parent.parent
    return any((root / folder / "cusparse.h").is_file() for folder in ("include", "targets"))


#: Folder of the sources below a work folder.
SOURCE = "source"


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A unit to compile: its path in the sources, and the compiler's arguments without files."""

    path: str
    words: tuple[str, ...]

    @property
    def object(self) -> str:
        """The object file's path relative to the work folder."""
        return f"{self.path}.o"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command with relative paths; ``failure`` is the start of its error message."""

    words: tuple[str, ...]
    failure: str


class Executor(Protocol):
    """The interface of an executor of compilers and linkers."""

    @property
    def host(self) -> HostCompiler:
        """The host compiler for the target platform."""

    @property
    def c_library(self) -> Path:
        """That compiler's C library, as a local file."""

    def identity(self, headers: Sequence[Path]) -> tuple[str, ...]:
        """What objects depend on besides sources and command arguments."""

    @property
    def alone(self) -> bool:
        """Whether units are compiled one at a time by default, because memory is unknown."""

    @property
    def root(self) -> Path:
        """The root folder, which is removed from messages so that objects do not depend on it."""

    def source(self, work: Path) -> Path:
        """The path of a work folder's sources."""

    def folders(self, folders: Sequence[Path]) -> tuple[Path, ...]:
        """The paths of header folders."""

    def compile(
        self, work: Path, batch: Sequence[Compilation], at_once: int, headers: Sequence[Path]
    ) -> dict[str, float]:
        """Compile units into a work folder with the sources; returns seconds by object.

        Raises:
            BuildFailed: a unit does not compile; the message has its first error.
            EngineError: a tool is missing.
        """

    def run(self, folder: Path, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        """Run commands in order on the files of a folder, which receives their outputs.

        Raises:
            BuildFailed: one of them fails.
        """


@dataclass(frozen=True)
class LocalExecutor:
    """Runs on this machine: ninja compiles, and continues after an interruption."""

    host: HostCompiler = NATIVE

    alone = False

    @property
    def c_library(self) -> Path:
        words = [self.host.command, "-print-file-name=libc.so.6"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())

    @property
    def root(self) -> Path:
        return cache_dir()

    def identity(self, headers: Sequence[Path]) -> tuple[str, ...]:
        del headers  # commands have their names
        return ()

    def source(self, work: Path) -> Path:
        return work / SOURCE

    def folders(self, folders: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(folders)

    def compile(
        self, work: Path, batch: Sequence[Compilation], at_once: int, headers: Sequence[Path]
    ) -> dict[str, float]:
        del headers  # they are where their names say
        ninja = find_ninja()
        _write_ninja(work, batch)
        began = time.monotonic()
        done = subprocess.run(
            [ninja, "-C", str(work), "-j", str(at_once), "--quiet"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        console.detail(f"ninja ended after {time.monotonic() - began:.0f} s")
        if done.returncode:
            raise refused(done.stdout, work)
        return _seconds(work / ".ninja_log")

    def run(self, folder: Path, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        del outputs
        for step in steps:
            done = subprocess.run(
                step.words, cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise failed(step, done.stderr or done.stdout)


def refused(output: str, work: Path) -> BuildFailed:
    """The error for a unit that does not compile, with the compiler's first error."""
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    shown = "\n  ".join(lines[:3]) or output[-600:]
    return BuildFailed(f"the compiler refused a unit:\n  {shown}", hint=f"sources and log: {work}")


def failed(step: Step, output: str) -> BuildFailed:
    """The error for a failed command, with the end of its output."""
    return BuildFailed(f"{step.failure}: {output.strip()[-800:]}")


def find_ninja() -> str:
    """The path of ninja: on PATH, or next to this Python.

    Raises:
        EngineError: ninja is not installed.
    """
    beside = Path(sys.executable).parent / "ninja"
    ninja = shutil.which("ninja") or (str(beside) if beside.is_file() else None)
    if ninja is None:
        raise EngineError("ninja is not installed", hint="pip install 'spark-build[compile]'")
    return ninja


def _write_ninja(work: Path, batch: Sequence[Compilation]) -> None:
    launcher = shutil.which("ccache")
    prefix = f"{launcher} " if launcher else ""
    rows = ["ninja_required_version = 1.8"]
    for number, unit in enumerate(batch):
        words = shlex.join(unit.words).replace("$", "$$")
        rows += [
            f"rule unit{number}",
            f"  command = {prefix}{words} -c $in -o $out",
            f"  description = {unit.path}",
            f"build {unit.object}: unit{number} {SOURCE}/{unit.path}",
        ]
    (work / "build.ninja").write_text("\n".join(rows) + "\n")


def _seconds(log: Path) -> dict[str, float]:
    """Output -> seconds; ninja's log has start and end in milliseconds; the last entry counts."""
    seconds = {}
    for line in log.read_text().splitlines()[1:]:
        start, end, _, output, *_ = line.split("\t")
        seconds[output] = (int(end) - int(start)) / 1000
    return seconds


# ------------------------------------------------------------------------ in containers of an image


#: The toolkit release whose compiler supports SM121 and whose runtime GB10's driver supports.
CUDA = "13"
_NEEDED = "name an image with nvcc 13 and g++: --toolkit nvidia/cuda:13.0.1-devel-ubuntu22.04"
#: A shell's exit status of a killed command, for example when memory runs out.
_KILLED = 137
_STEP = re.compile(r"spark-build: step (\d+)")


@dataclass(frozen=True, kw_only=True)
class ImageCompilers:
    """The compilers of an image; ``cuda`` is a release (``13.0``), versions are exact."""

    nvcc: str
    cuda: str
    versions: dict[str, str]
    #: whether it has headers of CUDA libraries such as cuSPARSE
    library_headers: bool


@dataclass(frozen=True, kw_only=True)
class ContainerExecutor:
    """An executor that runs each batch as a build; the builder caches finished parts."""

    containers: Containers
    image: PinnedImage
    toolkit: ImageCompilers
    #: a local folder with the image's CUDA runtime and C library, for reading
    libraries: Path

    host = NATIVE
    root = ROOT

    @property
    def c_library(self) -> Path:
        return self.libraries / "libc.so.6"

    def identity(self, headers: Sequence[Path]) -> tuple[str, ...]:
        """The identity of the compiler, independent of header folders' paths."""
        return self.image.digest, self.image.platform, *map(str, headers)

    @property
    def nvcc(self) -> Path:
        """The path of nvcc in the image."""
        return Path(self.toolkit.nvcc)

    @property
    def alone(self) -> bool:
        return self.containers.elsewhere

    @property
    def planned(self) -> ToolkitImage:
        """Its entry in a plan, without where it runs."""
        return ToolkitImage(image=self.image.name, digest=self.image.digest)

    def source(self, work: Path) -> Path:
        del work
        return ROOT / SOURCE

    def folders(self, folders: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(ROOT / _header(number) for number in range(len(folders)))

    def tasks(self, batch: Sequence[Compilation], at_once: int) -> list[Task]:
        """A task for each unit, in as many chains as units are compiled in parallel."""
        return [
            Task(
                name=_unit(number),
                script=_compile_script(one, f"{ROOT}/out/{_unit(number)}"),
                after=_unit(number - at_once) if number >= at_once else "",
            )
            for number, one in enumerate(batch)
        ]

    def render(self, units: Sequence[str]) -> str:
        """The Dockerfile that compiles some units, for display: without mounts of headers."""
        tasks = self.tasks([Compilation(path=unit, words=()) for unit in units], 1)
        return self.containers.render(self.image.exact, tasks, [SOURCE])

    def compile(
        self, work: Path, batch: Sequence[Compilation], at_once: int, headers: Sequence[Path]
    ) -> dict[str, float]:
        seconds = _compile_times(work)
        left = [
            one for one in batch if one.object not in seconds or not (work / one.object).is_file()
        ]
        if not left:
            return seconds
        mounts = {SOURCE: work / SOURCE}
        mounts |= {_header(number): folder for number, folder in enumerate(headers)}
        tasks = self.tasks(left, at_once)
        with making(work / "out") as scratch:
            scratch.mkdir()
            try:
                self.containers.run(self.image, tasks, mounts, scratch)
            except TaskFailed as error:
                raise self._killed(error) or refused(error.output, work) from None
            for task, one in zip(tasks, left, strict=True):
                results = scratch / task.name
                target = work / one.object
                target.parent.mkdir(parents=True, exist_ok=True)
                (results / "object").replace(target)
                seconds[one.object] = float((results / "seconds").read_text())
        write_atomically(work / "seconds.json", json.dumps(seconds).encode())
        return seconds

    def run(self, folder: Path, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        task = Task(name="link", script=_link_script(steps, outputs))
        with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
            try:
                self.containers.run(self.image, [task], {"inputs": folder}, Path(scratch))
            except TaskFailed as error:
                raise self._killed(error) or _failed_step(steps, error.output) from None
            for name in outputs:
                shutil.copyfile(Path(scratch) / task.name / name, folder / name)

    def _killed(self, error: TaskFailed) -> BuildFailed | None:
        if error.status != _KILLED and "Killed" not in error.output:
            return None
        return BuildFailed(
            f"a compiler was killed on {self.containers.where}: it has too little memory",
            hint="compile fewer units at once with -j, or name a builder with more memory",
        )


@dataclass(frozen=True)
class ToolkitChoice:
    """The image to compile in, as the user gave it, and where its containers run."""

    image: str
    containers: Containers

    def open(self, platform: str) -> ContainerExecutor:
        """Open the image for a platform (``linux/arm64``); raises like ``open_toolkit``."""
        return open_toolkit(self.containers, self.image, platform)


def open_toolkit(containers: Containers, ref: str, platform: str) -> ContainerExecutor:
    """Open a toolkit image; its compilers are probed once and cached by its digest.

    Args:
        containers: where to run it.
        ref: the image, such as ``nvidia/cuda:13.0.1-devel-ubuntu22.04``.
        platform: the target: ``linux/arm64``.

    Raises:
        EngineError: there is no builder, the image is for another platform, or it lacks nvcc of
            CUDA 13, g++ or the CUDA runtime.
        RemoteError: the image is not available.
        UsageError: the reference is malformed.
    """
    image = containers.resolve(ref, platform)
    probe = _probe()
    key = sha256_hex(canonical_json([image.digest, image.platform, probe]))
    folder = cache_dir() / "toolkits" / key
    with locked(f"toolkit {key}"):
        if not (folder / "toolkit.json").is_file():
            with console.step(f"toolkit {image.name}"):
                _ask(containers, image, probe, folder)
    toolkit = ImageCompilers(**json.loads((folder / "toolkit.json").read_bytes()))
    return ContainerExecutor(
        containers=containers, image=image, toolkit=toolkit, libraries=folder / "lib"
    )


def _probe() -> str:
    return package_file("data", "toolkit_probe.sh").read_text()


def _ask(containers: Containers, image: PinnedImage, probe: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        try:
            containers.run(image, [Task(name="probe", script=probe)], {}, Path(scratch))
        except TaskFailed as error:
            raise EngineError(
                f"{image.name} could not be inspected: {error.output[-400:] or error}",
                hint=_NEEDED,
            ) from None
        answers = Path(scratch) / "probe"
        toolkit = _read(image, answers)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(answers / "lib", folder / "lib")
    write_atomically(folder / "toolkit.json", json.dumps(asdict(toolkit)).encode())


def _read(image: PinnedImage, answers: Path) -> ImageCompilers:
    """Parse the reply of the probe.

    Raises:
        EngineError: a required part is missing.
    """

    def answer(name: str) -> str:
        with contextlib.suppress(OSError):
            return (answers / name).read_text("utf-8", "replace").strip()
        return ""

    nvcc, version_output = answer("nvcc"), answer("nvcc-version")
    cuda = release_in(version_output)
    lacks = ""
    if not nvcc:
        lacks = "has no nvcc, on PATH or at /usr/local/cuda/bin/nvcc"
    elif not cuda:
        lacks = f"has an nvcc that prints no release: {version_output[:200]!r}"
    elif cuda.partition(".")[0] != CUDA:
        lacks = f"has nvcc of CUDA {cuda}, but kernels for SM121 need CUDA {CUDA}"
    elif not answer("host"):
        lacks = "has no g++, which nvcc calls"
    for name in ("libc.so.6", "libcudart.so", f"libcudart.so.{CUDA}"):
        if not lacks and not (answers / "lib" / name).is_file():
            lacks = f"has no {name} where {nvcc} links: its toolkit is incomplete"
    if lacks:
        raise EngineError(f"{image.name} ({image.digest[:19]}) {lacks}", hint=_NEEDED)
    return ImageCompilers(
        nvcc=nvcc,
        cuda=cuda,
        versions={"nvcc": version_in(version_output), "host": version_in(answer("host-version"))},
        library_headers=(answers / "library-headers").exists(),
    )


def _header(number: int) -> str:
    return f"headers{number}"


def _unit(number: int) -> str:
    return f"unit{number}"


def _compile_times(work: Path) -> dict[str, float]:
    """Finished objects, with their compile times."""
    with contextlib.suppress(OSError, ValueError):
        seconds: dict[str, float] = json.loads((work / "seconds.json").read_bytes())
        return seconds
    return {}


def _compile_script(unit: Compilation, out: str) -> str:
    words = [*unit.words, "-c", f"{ROOT}/{SOURCE}/{unit.path}", "-o", f"{out}/object"]
    return "\n".join(
        [
            f"mkdir -p {out} || exit",
            "began=$(date +%s)",
            f"{shlex.join(words)} || exit",
            f"echo $(( $(date +%s) - began )) > {out}/seconds",
            "",
        ]
    )


def _link_script(steps: Sequence[Step], outputs: Sequence[str]) -> str:
    rows = [f"mkdir -p {ROOT}/out/link {ROOT}/work && cd {ROOT}/work || exit"]
    rows.append(f"cp -R {ROOT}/inputs/. . || exit")
    for number, step in enumerate(steps):
        rows += [f"echo 'spark-build: step {number}'", f"{shlex.join(step.words)} || exit"]
    rows.append(f"cp {shlex.join(outputs)} {ROOT}/out/link/")
    return "\n".join([*rows, ""])


def _failed_step(steps: Sequence[Step], output: str) -> BuildFailed:
    """The failed step: the last one started; before the first, copying files in failed."""
    began = list(_STEP.finditer(output))
    if not began:
        return BuildFailed(f"no files in the container: {output.strip()[-800:]}")
    return failed(steps[int(began[-1][1])], output[began[-1].end() :])
