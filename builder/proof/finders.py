"""Which file Python imports for a module name, derived from the names of files.

It follows CPython's ``importlib/_bootstrap_external.py``: ``FileFinder.find_spec`` for one folder
of ``sys.path`` or of a package, ``SourceLoader.get_code`` for compiled files (PEP 3147, PEP 552).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from builder.applier.receipts import receipts_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from builder.applier.trees import Tree

#: Where compiled files of sources are (PEP 3147).
CACHE = "__pycache__"
#: The triplets of platforms in names of extension modules (``Python/dynload_shlib.c``).
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
#: Length of a compiled file's header, and the end of the magic number in it (PEP 552).
_HEADER, _MAGIC_END = 16, b"\r\n"
_HASHED, _FLAGS = 0b01, 0b11
_TAGGED = re.compile(r"(?P<stem>[^.]+)\.(?P<tag>[^.]+)(\.opt-[A-Za-z0-9]+)?\.pyc")


class Files(Protocol):
    """Folders and files by path; links count as what they lead to."""

    def children(self, directory: str) -> Collection[str]:
        """The names in a folder; none if it is not a folder."""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The names of files that one build of Python imports."""

    #: suffixes in the order in which the finder tries them
    suffixes: tuple[str, ...]
    #: the tags of compiled files: ``cpython-312``
    tags: tuple[str, ...]

    @classmethod
    def of(cls, version: str, platform: str) -> Naming:
        """For ``3.12`` and ``linux/arm64``, with a GIL or free-threaded."""
        number = version.replace(".", "")
        machine = _MACHINES.get(platform.split("/")[1], platform.split("/")[1])
        tags = (f"cpython-{number}", f"cpython-{number}t")
        libraries = ("gnu", "musl")
        native = [f".{tag}-{machine}-linux-{libc}.so" for tag in tags for libc in libraries]
        return cls(suffixes=(*native, ".abi3.so", ".so", ".py", ".pyc"), tags=tags)

    def stem(self, name: str) -> str:
        """The module name of a file; ``""`` if Python imports no such file."""
        for suffix in self.suffixes:
            stem = name.removesuffix(suffix)
            if stem != name and stem and "." not in stem:
                return stem
        return ""

    def compiled_from(self, name: str) -> str:
        """The module name of a file in ``__pycache__``; ``""`` if this Python ignores it."""
        match = _TAGGED.fullmatch(name)
        return match["stem"] if match and match["tag"] in self.tags else ""


def may_run(compiled: bytes, source: bytes | None) -> bool:
    """Whether Python may run a compiled file in ``__pycache__`` instead of this source.

    Its time stamp is not compared, and neither is the hash of a source: a file of the same size, or
    with a hash, counts.  Only what every Python ignores is harmless.
    """
    if len(compiled) < _HEADER or compiled[2:4] != _MAGIC_END:
        return False
    flags = int.from_bytes(compiled[4:8], "little")
    if flags & ~_FLAGS:
        return False
    size = int.from_bytes(compiled[12:16], "little")
    return bool(flags & _HASHED) or source is None or size == len(source) & 0xFFFFFFFF


def is_unchecked(compiled: bytes) -> bool:
    """Whether Python runs a compiled file without a look at its source (PEP 552)."""
    return may_run(compiled, None) and int.from_bytes(compiled[4:8], "little") == _HASHED


@dataclass(frozen=True)
class Shadow:
    """A file that Python runs instead of another; a folder (a namespace) ends with ``/``."""

    path: str
    hides: str

    def __str__(self) -> str:
        return f"{self.path} instead of {self.hides}"


@dataclass(frozen=True)
class Finder:
    """Finds modules in the folders of a tree."""

    files: Files
    naming: Naming

    def candidates(self, folder: str, stem: str) -> list[str]:
        """Every file that could be a module, in Python's order: the first one is imported.

        A folder without ``__init__`` (a namespace) comes last, and ends with ``/``.
        """
        names = set(self.files.children(folder))
        path = _join(folder, stem)
        inside = set(self.files.children(path)) if stem in names else set()
        package = self._present(path, "__init__", inside) if inside else []
        found = [*package, *self._present(folder, stem, names)]
        return [*found, f"{path}/"] if inside and not package else found

    def _present(self, folder: str, stem: str, names: Collection[str]) -> list[str]:
        named = [f"{stem}{suffix}" for suffix in self.naming.suffixes if f"{stem}{suffix}" in names]
        return [path for name in named if not self.files.children(path := _join(folder, name))]

    def contested(self, folder: str) -> Iterator[list[str]]:
        """The candidates of every module in a folder that has several."""
        names = set(self.files.children(folder))
        stems = {self.naming.stem(name) for name in names} - {""}
        for stem in sorted(stems):
            found = self.candidates(folder, stem)
            if len(found) > 1:
                yield found

    def compiled(self, path: str) -> list[str]:
        """The files in ``__pycache__`` that this Python looks for beside a source."""
        folder, _, name = path.rpartition("/")
        stem, cache = name.removesuffix(".py"), _join(folder, CACHE)
        if stem == name:
            return []
        names = sorted(self.files.children(cache))
        return [f"{cache}/{one}" for one in names if self.naming.compiled_from(one) == stem]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def folders_below(tree: Tree, tops: Collection[str]) -> Iterator[str]:
    """These folders of a tree, and every folder below them, without compiled files."""
    pending = sorted(tops)
    while pending:
        folder = pending.pop()
        names = [name for name in tree.children(folder) if name != CACHE]
        if names:
            yield folder
            pending.extend(f"{folder}/{name}" for name in names)


def changed_packages(tree: Tree) -> set[str]:
    """The folders and modules of site-packages in which layers changed files."""
    paths = {path for receipt in receipts_of(tree) for path in receipt.files}
    tops = {path.partition("/")[0] for path in paths}
    return {top for top in tops if not top.endswith((".dist-info", ".pth"))}
