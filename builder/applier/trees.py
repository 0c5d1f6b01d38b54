"""A site-packages directory, on disk or not, and changes on top of one."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from builder.applier.files import open_regular, read_regular
from builder.applier.values import (
    EXIT_MISSING,
    EXIT_REMOTE,
    EXIT_USAGE,
    ApplyError,
    normalize,
    sha256_hex,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Got = TypeVar("Got")


def prune(directory: Path, root: Path) -> None:
    """Remove a directory and its parents up to ``root`` while they are empty.

    An empty package directory would still be importable, as a namespace package.
    """
    while directory != root:
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent


def drop_empty(directory: Path, root: Path) -> None:
    """Remove a directory and its parents up to ``root`` while they have only caches."""
    while directory != root:
        cache = directory / "__pycache__"
        if cache.is_dir() and not any(directory.glob("*.py")):
            shutil.rmtree(cache)
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent


@dataclass(frozen=True)
class Content:
    """The new content of a file: in memory, or a file of a pinned wheel that is read on demand."""

    sha256: str
    size: int
    mode: int = 0o644
    data: bytes | None = field(default=None, repr=False)
    load: Callable[[], bytes] | None = field(default=None, repr=False, compare=False)
    origin: str = ""

    @classmethod
    def of(cls, data: bytes, mode: int = 0o644) -> Content:
        """Content in memory."""
        return cls(sha256=sha256_hex(data), size=len(data), mode=mode, data=data)

    def read(self) -> bytes:
        """The bytes, checked against the digest.

        Raises:
            ApplyError: the bytes do not match the sha256.
        """
        if self.data is not None:
            return self.data
        assert self.load is not None
        data = self.load()
        if sha256_hex(data) != self.sha256:
            raise ApplyError(
                f"{self.origin}: sha256 is {sha256_hex(data)}, pinned is {self.sha256}",
                EXIT_REMOTE,
            )
        return data


#: Path below site-packages -> new content, or None for a removed file.
Changes = dict[str, "Content | None"]


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: normalised name, version, and its ``.dist-info`` directory."""

    name: str
    version: str
    info_dir: str


class Tree(Protocol):
    """A site-packages directory of any kind.  Paths are relative POSIX paths."""

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None if it does not exist."""

    def digest(self, path: str) -> str | None:
        """The file's sha256, or None; cheaper than :meth:`read` if RECORD has it."""

    def mode(self, path: str) -> int:
        """Permission bits of a file that exists."""

    def children(self, directory: str) -> list[str]:
        """Names directly below a directory ('' is the root), sorted; empty if it does not exist."""

    def distributions(self) -> dict[str, Distribution]:
        """Installed distributions by normalised name."""


_INFO_NAME = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)\.dist-info$")


def distribution_of(info_dir: str) -> Distribution | None:
    """The distribution of a ``NAME-VERSION.dist-info`` directory."""
    match = _INFO_NAME.match(info_dir)
    if not match:
        return None
    return Distribution(normalize(match["name"]), match["version"], info_dir)


def versions(tree: Tree) -> dict[str, str]:
    """Installed versions by normalised distribution name."""
    return {name: dist.version for name, dist in tree.distributions().items()}


#: What opening a path raises that is not a file's.
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
#: Bytes of a file that is read whole (texts), and of one of which only the digest is wanted.
_MOST_READ, _MOST_DIGESTED = 512 << 20, 8 << 30
_BLOCK = 1 << 20


def digest_of(file: Path) -> str:
    """The sha256 of a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or is far larger than any of a package.
    """
    digest = hashlib.sha256()
    with open_regular(file, _MOST_DIGESTED) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class DirTree:
    """A real site-packages directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str) -> bytes | None:
        return self._of(path, lambda file: read_regular(file, _MOST_READ))

    def digest(self, path: str) -> str | None:
        return self._of(path, digest_of)

    def _of(self, path: str, read: Callable[[Path], Got]) -> Got | None:
        """What a function reads of a file; None if there is no file.

        Raises:
            ApplyError: it cannot be read, or is no regular file.
        """
        if "\0" in path:
            return None
        try:
            return read(self.root / path)
        except _NO_FILE:
            return None
        except OSError as error:
            where = error.filename or self.root / path
            raise ApplyError(f"{where}: cannot be read: {error.strerror}", EXIT_USAGE) from None

    def mode(self, path: str) -> int:
        return stat.S_IMODE((self.root / path).stat().st_mode)

    def children(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / directory))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return []

    def distributions(self) -> dict[str, Distribution]:
        by_name: dict[str, Distribution] = {}
        for name in self.children(""):
            dist = distribution_of(name)
            if dist and (self.root / name / "METADATA").is_file():
                by_name[dist.name] = dist
        return by_name


class OverlayTree:
    """A tree with changes, on which the next layer is judged."""

    def __init__(self, base: Tree) -> None:
        self.base = base
        self.changes: Changes = {}
        #: folder -> names in it that were changed -> how many files at or below it now exist
        self._below: dict[str, dict[str, int]] = {}

    def update(self, changes: Mapping[str, Content | None]) -> None:
        """Add changes; later ones take precedence."""
        for path, content in changes.items():
            known = path in self.changes
            before = known and self.changes[path] is not None
            self.changes[path] = content
            more = (content is not None) - before
            if more or not known:
                self._count(path, more)

    def _count(self, path: str, more: int) -> None:
        """Count a changed path in every folder above it."""
        while path:
            folder, _, name = path.rpartition("/")
            names = self._below.setdefault(folder, {})
            names[name] = names.get(name, 0) + more
            path = folder

    def read(self, path: str) -> bytes | None:
        if path in self.changes:
            content = self.changes[path]
            return None if content is None else content.read()
        return self.base.read(path)

    def digest(self, path: str) -> str | None:
        if path in self.changes:
            content = self.changes[path]
            return None if content is None else content.sha256
        return self.base.digest(path)

    def mode(self, path: str) -> int:
        content = self.changes.get(path)
        return content.mode if content is not None else self.base.mode(path)

    def children(self, directory: str) -> list[str]:
        names = set(self.base.children(directory))
        prefix = f"{directory}/" if directory else ""
        for name, count in self._below.get(directory, {}).items():
            if count > 0:
                names.add(name)
            elif self.changes.get(prefix + name, self) is None:
                names.discard(name)
        return sorted(names)

    def distributions(self) -> dict[str, Distribution]:
        by_name = dict(self.base.distributions())
        for path, content in self.changes.items():
            info_dir, _, rest = path.partition("/")
            dist = distribution_of(info_dir) if rest == "METADATA" else None
            if dist is None:
                continue
            if content is not None:
                by_name[dist.name] = dist
            elif by_name.get(dist.name) == dist:
                del by_name[dist.name]
        return by_name


def stale_pyc(tree: Tree, paths: Iterable[str]) -> list[str]:
    """Compiled files of the ``.py`` files among some paths.

    They are removed with every change: a hash-based .pyc may be 'unchecked' (PEP 552), and then
    Python would still run the old code.
    """
    stems: dict[str, list[str]] = {}
    for path in paths:
        if path.endswith(".py"):
            directory, _, name = path.rpartition("/")
            cache = f"{directory}/__pycache__" if directory else "__pycache__"
            stems.setdefault(cache, []).append(name.removesuffix("py"))
    return [
        f"{cache}/{name}"
        for cache, starts in stems.items()
        for name in tree.children(cache)
        if name.startswith(tuple(starts)) and ".pyc" in name
    ]


def collision(paths: Iterable[str], tree: OverlayTree) -> str:
    """Why a tree cannot have files at all these paths: one is a folder, or below a file.

    ``tree`` already has the files.
    """
    folders: dict[str, None] = {}
    for path in paths:
        if tree.children(path):
            return f"{path} is a folder, and a file in its place would hide all its files"
        above = path
        while (above := above.rpartition("/")[0]) and above not in folders:
            folders[above] = None
    for folder in folders:
        if tree.digest(folder) is not None:
            below = next(path for path in paths if path.startswith(f"{folder}/"))
            return f"{folder} is a file, and so {below} cannot be below it"
    return ""


def find_site_packages() -> Path:
    """This interpreter's site-packages directory with vLLM.

    Raises:
        ApplyError: vLLM is not installed for this interpreter.
    """
    candidates = [os.environ.get("VLLM_SITE_PACKAGES", ""), *sys.path]
    for candidate in candidates:
        root = Path(candidate)
        if candidate and any(root.glob("vllm-*.dist-info/METADATA")):
            return root.resolve()
    raise ApplyError(
        f"vllm is not installed for {sys.executable}",
        EXIT_MISSING,
        "set VLLM_SITE_PACKAGES to the directory with vllm",
    )
