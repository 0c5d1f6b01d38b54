"""Evaluates a release's own CMakeLists.txt to find what its build would compile.

It needs no compiler, torch or GPU: ``builder/data/cmake_probe.cmake`` runs the file in CMake's
script mode and records each extension's sources and their architectures.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import EngineError, UsageError
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.compile.source import SourceTree

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
        found = _ARCH.fullmatch(word)
        if not found:
            raise UsageError(
                f"{word!r} in architecture list {arch_list!r} is not like 12.1a or 9.0+PTX"
            )
        number = f"{found[1]}{found[2]}{found[3]}"
        flags.append(f"-gencode arch=compute_{number},code=sm_{number}")
        if found[4]:
            flags.append(f"-gencode arch=compute_{number},code=compute_{number}")
    return " ".join(flags)


def cmake_program() -> str:
    """The path of CMake: on PATH, or next to this Python (from the package ``cmake``).

    Raises:
        EngineError: it is missing.
    """
    beside = Path(sys.executable).parent / "cmake"
    found = shutil.which("cmake") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise EngineError(
            "cmake is not installed; it is needed to read a release's build files",
            hint="pip install 'spark-build[compile]'",
        )
    return found


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
        made = {path for kind, *words in rows if kind == "source" for path in words[1:]}
        # headers too: marlin.cu includes one that comes with its kernels
        made |= {file.relative_to(copy).as_posix() for file in (copy / "csrc").rglob("*.h")}
        generated = {
            path: (copy / path).read_bytes()
            for path in sorted(made)
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
