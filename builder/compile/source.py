"""vLLM's sources: a released archive, a commit from its forge, or a folder.

The version of a base that was built between releases names its commit
(``0.19.2.dev31+g0123abcd``, as setuptools-scm writes it).
"""

from __future__ import annotations

import io
import re
import tarfile
from contextlib import closing
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from builder.applier.values import canonical_json, sha256_hex
from builder.common.console import console
from builder.common.forge import Forges, site
from builder.common.leftovers import making
from builder.common.locks import locked
from builder.common.paths import cache_dir
from builder.common.pypi import download
from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    named = {path.relative_to(root).as_posix(): sha256_hex(path.read_bytes()) for path in files}
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
