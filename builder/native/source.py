"""The source of a release: its archive on the package index, pinned by sha256, or a folder."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.console import console
from builder.errors import UsageError
from builder.locks import locked
from builder.paths import cache_dir
from builder.wheels import download

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.index import PackageIndex

#: What building extensions needs of vLLM's archive: a third of it.
_PARTS = ("csrc", "cmake", "CMakeLists.txt", "pyproject.toml", "setup.py", "PKG-INFO")


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """An unpacked source archive; ``sha256`` is the archive's, empty for a user's folder."""

    root: Path
    version: str
    sha256: str = ""


def release_source(index: PackageIndex, version: str) -> SourceTree:
    """vLLM's source as released, unpacked into the cache once.

    Raises:
        UsageError: the release has no source archive, or it is not one of vLLM.
        RemoteError: the download breaks off or has another digest.
    """
    file = index.sdist("vllm", version)
    final = cache_dir() / "sources" / file.sha256
    with locked(f"source {file.sha256}"):
        if not (final / "CMakeLists.txt").is_file():
            archive = download(file, index)
            console.detail(f"unpacking {file.filename}")
            final.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=final.parent))
            try:
                _unpack(archive, work / "tree")
                (work / "tree").rename(final)
            finally:
                shutil.rmtree(work)
            archive.unlink()
    return SourceTree(root=final, version=version, sha256=file.sha256)


def _unpack(archive: Path, target: Path) -> None:
    """The parts that a build needs, without the archive's own first folder."""
    target.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(target, members=_wanted(tar), filter="data")
    if not (target / "CMakeLists.txt").is_file():
        raise UsageError(f"{archive.name} holds no CMakeLists.txt: it is not vLLM's source")


def _wanted(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        _, _, inner = member.name.partition("/")
        if inner.split("/", 1)[0] in _PARTS:
            yield member.replace(name=inner, deep=False)
