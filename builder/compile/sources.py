"""A release's sources, the units that its own build compiles, and the files that each includes.

Sources are a released archive, a commit from its forge, or a folder.  The version of a base that
was built between releases names its commit (``0.19.2.dev31+g0123abcd``), as setuptools-scm does.

CMake evaluates the release's CMakeLists.txt, without a compiler, torch or GPU:
``builder/data/cmake_probe.cmake`` runs the file in script mode and records each extension's sources
and their architectures.  Includes are followed textually, as if every branch were taken: this may
name a unit that is not affected by a change, but never misses one.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from builder.applier.files import DOCUMENT, read_regular
from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.console import console
from builder.common.forge import Forges, site
from builder.common.leftovers import making
from builder.common.paths import cache_dir, package_file
from builder.common.pypi import download
from builder.errors import EngineError, RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from builder.common.pypi import PackageIndex


#: vLLM's repository; a clone or mirror may replace it.
REPOSITORY = "vllm-project/vllm"

#: Parts of vLLM's archive that the build of extensions needs: a third of it.
_PARTS = ("csrc", "cmake", "CMakeLists.txt", "pyproject.toml", "setup.py", "PKG-INFO")
#: setuptools-scm's form of a commit in the local part of a version.
_COMMIT = re.compile(r"g([0-9a-f]{7,40})")


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """An unpacked source tree.

    ``sha256`` is the archive's for a release, that of paths and contents for a commit (forges
    do not create reproducible archives), and empty for a user's folder; ``origin`` is the archive's
    file name, or ``git+https://HOST/OWNER/REPO@COMMIT``.
    """

    root: Path
    version: str
    sha256: str = ""
    origin: str = ""
    #: its files are changed after that; ``sha256`` tells what it was made from
    edited: bool = False


def source_of(index: PackageIndex, version: str, forges: Forges | None = None) -> SourceTree:
    """The source of a vLLM version, unpacked into the cache once.

    Args:
        index: where the archives of releases are.
        version: the installed version; its local part may name the commit.
        forges: the forge or clones for commits.

    Raises:
        UsageError: the release does not exist, and the version names no commit.
        RemoteError: it cannot be downloaded, or the forge does not have the commit.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise UsageError(
            f"{version!r} is not a vLLM version",
            hint="a release like 0.19.1, or 0.19.2.dev3+gCOMMIT",
        ) from None
    named = next((m[1] for s in str(parsed.local).split(".") if (m := _COMMIT.fullmatch(s))), "")
    if parsed.is_devrelease and named:
        return commit_source(parsed.public, named, forges or Forges())
    if parsed.is_devrelease:
        raise UsageError(
            f"vllm {version} is not a release, and its version names no commit, so its source is "
            f"unknown",
            hint=f"install it from its repository to get {parsed.public}+gCOMMIT",
        )
    return release_source(index, parsed.public)


def release_source(index: PackageIndex, version: str) -> SourceTree:
    """vLLM's source archive of a release.

    Raises:
        UsageError: the release has no source archive, or it is not one of vLLM.
        RemoteError: the download breaks off or has another digest.
    """
    file = index.sdist("vllm", version)
    final = cache_dir() / "sources" / file.sha256
    with locked(f"source {file.sha256}"):
        if not (final / "CMakeLists.txt").is_file():
            archive = download(file, index)
            with archive.open("rb") as stream:
                _lay_out(stream, file.filename, final)
            archive.unlink()
    return SourceTree(root=final, version=version, sha256=file.sha256, origin=file.filename)


def commit_source(version: str, commit: str, forges: Forges) -> SourceTree:
    """vLLM's source at a commit, which may be abbreviated.

    Raises:
        RemoteError: the forge does not respond or have the commit, or it is not vLLM's.
    """
    folder = cache_dir() / "sources"
    with locked(f"source {commit[:7]}"):
        folders = sorted(folder.glob(f"git-{commit}*"))
        if len(folders) != 1:
            forge, name = forges.for_repository(REPOSITORY)
            full = forge.commit(REPOSITORY, commit)
            folders = [folder / f"git-{full}"]
            if not folders[0].is_dir():
                with console.step(f"source of vllm at {full[:12]}, from {name}"):
                    packed = io.BytesIO(forge.archive(REPOSITORY, full))
                    _lay_out(packed, f"{REPOSITORY}@{full[:12]}", folders[0])
    full = folders[0].name.removeprefix("git-")
    return SourceTree(
        root=folders[0],
        version=version,
        sha256=_content_digest(folders[0]),
        origin=f"git+https://{site().host}/{REPOSITORY}@{full}",
    )


def _content_digest(root: Path) -> str:
    """The sha256 of all paths and contents below a folder."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    named = {
        path.relative_to(root).as_posix(): sha256_hex(read_regular(path, DOCUMENT))
        for path in files
    }
    return sha256_hex(canonical_json(named))


def _lay_out(archive: IO[bytes], name: str, final: Path) -> None:
    """Unpack the parts that a build needs, without the archive's top folder."""
    console.detail(f"unpacking {name}")
    final.parent.mkdir(parents=True, exist_ok=True)
    with making(final) as work:
        work.mkdir()
        try:
            with closing(tarfile.open(fileobj=archive)) as tar:
                tar.extractall(work, members=_wanted(tar), filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise RemoteError(f"{name} is not an archive: {error}") from None
        if not (work / "CMakeLists.txt").is_file():
            raise UsageError(f"{name} has no CMakeLists.txt, so it is not vLLM's source")
        work.rename(final)


def _wanted(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        _, _, inner = member.name.partition("/")
        if inner.split("/", 1)[0] in _PARTS:
            yield member.replace(name=inner, deep=False)


#: ``TORCH_CUDA_ARCH_LIST`` entries: 12.1a, 12.0f, 9.0+PTX.
_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One source file of an extension.

    ``gencodes`` are ``(virtual, real)`` architectures, such as ``("compute_121a", "sm_121a")``;
    empty for host sources.
    """

    path: str
    extension: str
    gencodes: tuple[tuple[str, str], ...]

    @property
    def cuda_arch(self) -> tuple[int, ...]:
        """``__CUDA_ARCH__`` of each compilation: 1210 for ``compute_121a``."""
        return tuple(int(re.sub(r"\D", "", virtual)) * 10 for virtual, _ in self.gencodes)


@dataclass(frozen=True, kw_only=True)
class Extension:
    """One extension module.  ``sabi`` is its stable Python ABI version, or empty."""

    name: str
    language: str
    sabi: str
    definitions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BuildRecipe:
    """What a release's build would compile for an architecture list and a CUDA version."""

    arch_list: str
    cuda: str
    #: architectures that pass the release's own filter
    archs: tuple[str, ...]
    supported: tuple[str, ...]
    units: Mapping[str, Unit]
    extensions: Mapping[str, Extension]
    flags: tuple[str, ...]
    #: external projects whose sources are not in the archive
    external: tuple[str, ...] = ()
    #: sources that the build generates: path -> content
    generated: Mapping[str, bytes] = field(default_factory=dict)


def gencode_flags(arch_list: str) -> str:
    """The flags that torch derives from ``TORCH_CUDA_ARCH_LIST`` (separator: semicolon or space).

    Raises:
        UsageError: an entry is not an architecture.
    """
    flags = []
    for word in re.split(r"[;\s]+", arch_list.strip()):
        match = _ARCH.fullmatch(word)
        if not match:
            raise UsageError(
                f"{word!r} in architecture list {arch_list!r} is not like 12.1a or 9.0+PTX"
            )
        number = f"{match[1]}{match[2]}{match[3]}"
        flags.append(f"-gencode arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode arch=compute_{number},code=compute_{number}")
    return " ".join(flags)


def cmake_program() -> str:
    """The path of CMake: on PATH, or next to this Python (from the package ``cmake``).

    Raises:
        EngineError: CMake is not installed.
    """
    beside = Path(sys.executable).parent / "cmake"
    cmake = shutil.which("cmake") or (str(beside) if beside.is_file() else None)
    if cmake is None:
        raise EngineError(
            "cmake is not installed; it is needed to read a release's build files",
            hint="pip install 'spark-build[compile]'",
        )
    return cmake


#: What was evaluated, by the sha256 of the sources, the architecture list and the CUDA version.
_ANSWERS: dict[tuple[str, str, str], BuildRecipe] = {}


def evaluate(source: SourceTree, arch_list: str, cuda: str) -> BuildRecipe:
    """Evaluate what a release would build, once for the same sources.

    Raises:
        EngineError: cmake is missing.
        UsageError: the architecture list is malformed, or the CMakeLists.txt cannot be evaluated.
    """
    asked = (source.sha256, arch_list, cuda)
    if source.edited or not source.sha256:
        return _evaluate(source, arch_list, cuda)
    if asked not in _ANSWERS:
        _ANSWERS[asked] = _evaluate(source, arch_list, cuda)
    return _ANSWERS[asked]


def _evaluate(source: SourceTree, arch_list: str, cuda: str) -> BuildRecipe:
    with tempfile.TemporaryDirectory(prefix="spark-build-cmake-") as folder:
        work = Path(folder)
        copy = work / "source"
        # its kernels are generated into the source tree, so use a copy
        shutil.copytree(source.root, copy, symlinks=True)
        settings = {
            "SPARK_SOURCE": copy,
            "SPARK_OUT": work / "record",
            "SPARK_SCRATCH": work / "scratch",
            "SPARK_GENCODE": gencode_flags(arch_list),
            "SPARK_CUDA_VERSION": cuda,
            "SPARK_PYTHON": sys.executable,
        }
        words = [f"-D{name}={value}" for name, value in settings.items()]
        script = str(package_file("data", "cmake_probe.cmake"))
        done = subprocess.run(
            [cmake_program(), *words, "-P", script],
            cwd=copy, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            message = " ".join(done.stderr.split())
            raise UsageError(
                f"the CMakeLists.txt of vllm {source.version} could not be read for "
                f"{arch_list}, CUDA {cuda}: {message[-600:]}"
            )
        text = (work / "record").read_text().replace(f"{copy}/", "")
        rows = [line.split("|") for line in text.splitlines()]
        read = {path for kind, *words in rows if kind == "source" for path in words[1:]}
        # headers too: marlin.cu includes one that comes with its kernels
        read |= {file.relative_to(copy).as_posix() for file in (copy / "csrc").rglob("*.h")}
        generated = {
            path: (copy / path).read_bytes()
            for path in sorted(read)
            if not (source.root / path).exists()
        }
    return _recipe(rows, generated, arch_list, cuda)


def _recipe(
    rows: list[list[str]], generated: Mapping[str, bytes], arch_list: str, cuda: str
) -> BuildRecipe:
    gencodes: dict[str, list[tuple[str, str]]] = {}
    definitions: dict[str, list[str]] = {}
    sources: dict[str, str] = {}
    targets: dict[str, tuple[str, str]] = {}
    variables: dict[str, tuple[str, ...]] = {}
    external: list[str] = []
    for kind, *words in rows:
        if kind == "gencode":
            gencodes.setdefault(words[0], []).append((words[1], words[2]))
        elif kind == "source":
            sources[words[1]] = words[0]
        elif kind == "target":
            targets[words[0]] = (words[1], words[2])
        elif kind == "definition" and words[1] not in ("PRIVATE", "PUBLIC", "INTERFACE"):
            definitions.setdefault(words[0], []).append(words[1])
        elif kind == "variable":
            variables[words[0]] = tuple(word for word in words[1:] if word)
        elif kind == "external":
            external.append(Path(words[0]).stem)
    units = {
        path: Unit(
            path=path,
            extension=extension,
            gencodes=tuple(dict.fromkeys(gencodes.get(path, ()))),
        )
        for path, extension in sources.items()
    }
    extensions = {
        name: Extension(
            name=name,
            language=language,
            sabi=sabi,
            definitions=tuple(dict.fromkeys(definitions.get(name, ()))),
        )
        for name, (language, sabi) in targets.items()
    }
    return BuildRecipe(
        arch_list=arch_list,
        cuda=cuda,
        archs=variables.get("CUDA_ARCHS", ()),
        supported=variables.get("CUDA_SUPPORTED_ARCHS", ()),
        units=units,
        extensions=extensions,
        flags=variables.get("VLLM_GPU_FLAGS", ()),
        external=tuple(external),
        generated=generated,
    )


# ------------------------------------------------------------------------- files that units include


_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
#: Suffixes of units and headers.
SUFFIXES = frozenset({".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".inl"})
#: A wrapper that enables a kernel on some architectures; on others it traps or does nothing.
_GUARD = re.compile(
    r"struct (enable_sm\w+) : Kernel \{(?:(?!struct ).)*?"
    r"#\s*if ([^\n]*__CUDA_ARCH__\s*[=<>][^\n]*)\n",
    re.DOTALL,
)
_COMPARISON = re.compile(r"__CUDA_ARCH__\s*(==|>=|<=|<|>)\s*(\d+)")


@dataclass(frozen=True)
class Sources:
    """The C++ and CUDA files of a source tree, and their includes of each other."""

    root: Path
    #: generated sources: path below the root -> content
    generated: Mapping[str, bytes] = field(default_factory=dict)
    #: new texts of files of the tree
    changed: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def texts(self) -> Mapping[str, bytes]:
        """Path below the root -> content."""
        files = {
            path.relative_to(self.root).as_posix(): read_regular(path, DOCUMENT)
            for path in sorted((self.root / "csrc").rglob("*"))
            if path.suffix in SUFFIXES and path.is_file()
        }
        return {**self.generated, **files, **self.changed}

    @cached_property
    def includes(self) -> Mapping[str, frozenset[str]]:
        """Path -> included paths in the tree."""
        return {path: frozenset(self._included(path, text)) for path, text in self.texts.items()}

    def _included(self, path: str, text: bytes) -> Iterable[str]:
        for name in _INCLUDE.findall(text):
            file = self.resolved(path, name.decode("utf-8", "replace"))
            if file:
                yield file

    def resolved(self, path: str, name: str) -> str:
        """The tree's file for an include; empty if there is none.

        First next to the file, then below ``csrc``, as in the build's include directories.
        """
        for place in (PurePosixPath(path).parent, PurePosixPath("csrc"), PurePosixPath()):
            path_in_tree = _normal(place / name)
            if path_in_tree in self.texts:
                return path_in_tree
        return ""

    def closure(self, path: str) -> frozenset[str]:
        """A file and all its includes, transitively."""
        seen, waiting = {path}, deque([path])
        while waiting:
            fresh = self.includes.get(waiting.popleft(), frozenset()) - seen
            seen |= fresh
            waiting.extend(fresh)
        return frozenset(seen)

    @cached_property
    def guards(self) -> Mapping[str, str]:
        """Guard -> its condition on ``__CUDA_ARCH__``."""
        conditions: dict[str, str] = {}
        for text in self.texts.values():
            if b'asm("trap;")' in text:
                conditions.update(_GUARD.findall(text.decode("utf-8", "replace")))
        return conditions


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def touched(sources: Sources, recipe: BuildRecipe, changed: Iterable[str]) -> list[Unit]:
    """The units to compile again if these files change, sorted by path."""
    wanted = set(changed)
    return [unit for path, unit in sorted(recipe.units.items()) if sources.closure(path) & wanted]


def lets_run(condition: str, cuda_arch: int) -> bool:
    """Whether all parts of a guard's condition are true for a value of ``__CUDA_ARCH__``."""
    compare = {
        "==": cuda_arch.__eq__,
        ">=": cuda_arch.__ge__,
        "<=": cuda_arch.__le__,
        "<": cuda_arch.__lt__,
        ">": cuda_arch.__gt__,
    }
    return all(compare[sign](int(number)) for sign, number in _COMPARISON.findall(condition))


def dead_guards(sources: Sources, unit: Unit) -> dict[str, str]:
    """SM12x guards that exclude a unit's kernels for the architectures it is compiled for.

    Returns guard -> file that uses it; empty if all kernels run.  Guards of other families are
    ignored: units for SM12x share headers with others, and instantiate their own kernels.
    """
    dead = {}
    for path in sorted(sources.closure(unit.path)):
        text = sources.texts[path].decode("utf-8", "replace")
        for name in re.findall(r"\b(enable_sm12\w+)<", text):
            condition = sources.guards.get(name)
            if condition and not all(lets_run(condition, arch) for arch in unit.cuda_arch):
                dead[name] = path
    return dead
