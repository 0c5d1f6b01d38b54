"""The tools to compile a unit of vLLM: nvcc, and headers.

A machine with vLLM's environment has all of them; elsewhere the headers are read from
released wheels by range, pinned by their sha256 on the index, and nothing is installed.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement

from builder.compile.toolkit import toolkit_parts
from builder.documents.compiled import Input
from builder.errors import UsageError
from builder.model.platform import Platform
from builder.pypi.wheels import RemoteWheel
from builder.util.console import console
from builder.util.locks import locked
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from builder.compile.compiler import Compiler
    from builder.pypi.index import PackageIndex

#: CUTLASS for vLLM 0.20.0 to 0.22.1 (v4.4.2), in the wheel of this FlashInfer release;
#: vLLM's archive has none, because its build downloads it.
_CUTLASS_WHEEL = ("flashinfer-python", "0.6.9")
_CUTLASS = ("flashinfer/data/cutlass/include/", "flashinfer/data/cutlass/tools/util/include/")
#: CUDA toolkit parts with library headers that torch's CUDA headers include.
_CUDA_PARTS = ("nvidia-cublas", "nvidia-cusolver", "nvidia-cusparse", "nvidia-nvjitlink")
#: torch's CPU build lacks this generated header, which says that c10's CUDA part is a shared
#: library.
_CMAKE_MACROS = "c10/cuda/impl/cuda_cmake_macros.h"
_MACROS_TEXT = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """A compiler and header folders."""

    compiler: Compiler
    includes: tuple[Path, ...]


def make_toolchain(index: PackageIndex, torch: Path, compiler: Compiler) -> Toolchain:
    """A compiler, with torch's headers from ``torch`` and the rest from wheels.

    Args:
        index: where wheels are.
        torch: a site-packages with torch in it, of any build.
        compiler: from ``find_compiler``; unpacked if it comes from wheels.

    Raises:
        EngineError: the compiler cannot be unpacked, or does not run here.
        UsageError: ``torch`` holds no torch headers.
        RemoteError: the package index does not answer.
    """
    headers = torch / "torch" / "include"
    if not (headers / "torch" / "csrc").is_dir():
        raise UsageError(
            f"{torch} has no torch with headers",
            hint="name a site-packages that has torch with --torch",
        )
    includes = [headers, headers / "torch" / "csrc" / "api" / "include"]
    if not (headers / _CMAKE_MACROS).is_file():
        includes.append(_own_headers())
    compiler.ready(index)
    cutlass = wheel_headers(index, *_CUTLASS_WHEEL, prefixes=_CUTLASS)
    includes += [cutlass / prefix for prefix in _CUTLASS]
    if not compiler.has_library_headers:
        includes += _library_headers(index, compiler.cuda)
    return Toolchain(compiler=compiler, includes=tuple(includes))


def pinned_torch(root: Path) -> str:
    """The torch version for a source tree: the pin in its ``pyproject.toml``.

    Raises:
        UsageError: it has no pin.
    """
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
        rows = [Requirement(row) for row in project["build-system"]["requires"]]
    except (OSError, ValueError, KeyError, InvalidRequirement) as error:
        raise UsageError(f"{root}: its torch version cannot be read: {error}") from None
    for row in rows:
        for pin in row.specifier if row.name == "torch" else ():
            if pin.operator == "==":
                return pin.version
    raise UsageError(f"{root}/pyproject.toml pins no torch", hint="name one with --torch")


def torch_headers(index: PackageIndex, version: str) -> Path:
    """A site-packages with only the headers of a torch release, read by range.

    C++ built with other headers may need symbols that the release lacks.

    Raises:
        UsageError: the release is not on the index.
        RemoteError: the package index does not answer.
    """
    return wheel_headers(index, "torch", version, prefixes=("torch/include/",))


def header_version(tools: Toolchain) -> str:
    """The torch version of the headers.

    Raises:
        UsageError: they do not have it.
    """
    for name in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        for folder in tools.includes:
            with contextlib.suppress(OSError):
                text = (folder / name).read_text("utf-8")
                found = re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)
                if len(found) == 3:
                    return ".".join(found)
    raise UsageError(f"the headers in {tools.includes[0]} do not name their torch version")


def _own_headers() -> Path:
    folder = cache_dir() / "headers" / "own"
    target = folder / _CMAKE_MACROS
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_MACROS_TEXT)
    return folder


def header_wheels(index: PackageIndex, compiler: Compiler, torch: str) -> list[Input]:
    """The wheels with headers for units, by file name and sha256.

    Args:
        index: where wheels are.
        compiler: its toolkit may have the libraries' headers.
        torch: the torch release of the headers.
    """
    wanted = [_CUTLASS_WHEEL, ("torch", torch)]
    if not compiler.has_library_headers:
        wanted += _library_wheels(index, compiler.cuda)
    pins = []
    for project, version in wanted:
        file = _wheel(index, project, version).file
        pins.append(
            Input(distribution=project, version=version, filename=file.filename, sha256=file.sha256)
        )
    return pins


def _library_headers(index: PackageIndex, cuda: str) -> list[Path]:
    prefix = f"nvidia/cu{cuda.partition('.')[0]}/include/"
    return [
        wheel_headers(index, project, version, prefixes=(prefix,)) / prefix
        for project, version in _library_wheels(index, cuda)
    ]


def _library_wheels(index: PackageIndex, cuda: str) -> list[tuple[str, str]]:
    """Wheels of the newest toolkit release with nvcc's version; its metadata pins every part."""
    releases = [v for v in index.releases("cuda-toolkit") if v.startswith(f"{cuda}.")]
    if not releases:
        raise UsageError(f"the package index has no cuda-toolkit {cuda}, whose headers are needed")
    return list(toolkit_parts(index, releases[-1], _CUDA_PARTS).items())


def _wheel(index: PackageIndex, project: str, version: str) -> RemoteWheel:
    return RemoteWheel(index.choose(project, version, Platform.parse("linux/amd64", "3.12")), index)


def wheel_headers(
    index: PackageIndex, project: str, version: str, *, prefixes: Iterable[str]
) -> Path:
    """Unpack some folders of a wheel into the cache once; returns the folder.

    Raises:
        UsageError: the wheel has no such file.
    """
    chosen = tuple(prefixes)
    wheel = _wheel(index, project, version)
    final = cache_dir() / "headers" / wheel.file.sha256
    with locked(f"headers {wheel.file.sha256}"):
        if (final / "complete").is_file():
            return final
        names = sorted(name for name in wheel.members if name.startswith(chosen))
        if not names:
            raise UsageError(f"{wheel.file.filename} has nothing below {', '.join(chosen)}")
        console.detail(f"{len(names)} headers of {wheel.file.filename}")
        wheel.preload(names)
        for name in names:
            if name.endswith("/"):
                continue
            target = final / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(name))
        (final / "complete").touch()
    return final
