"""The kinds of cache entries and their folders.  Other files are listed, but never removed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Entries are named by a hash of their content or inputs.
_HASHED = re.compile(r"(?:[\w.+-]*-)?[0-9a-f]{12,64}(?:\.[\w.-]+)?")
_PAGE = re.compile(r"[a-z0-9][\w.-]*\.json(?:\.[\w.-]+\.part)?")
_VERSIONED = re.compile(r"[0-9a-f]{64}-\d+\.json")
_HEADERS = re.compile(rf"own|{_HASHED.pattern}")


@dataclass(frozen=True)
class CacheKind:
    """Entries of one kind: their parent folders, and their name pattern."""

    name: str
    folders: tuple[str, ...]
    meaning: str
    entry: re.Pattern[str] | None = _HASHED

    @property
    def prunable(self) -> bool:
        """Whether ``cache prune`` and ``cache clean`` may remove entries."""
        return self.entry is not None


KINDS = (
    CacheKind("wheels", ("wheels",), "released wheels, whole and checked"),
    CacheKind("ranges", ("ranges",), "files read by range out of wheels, for each index"),
    CacheKind("index", ("index",), "pages of the package index", _PAGE),
    CacheKind(
        "pulls", ("forge/diffs", "forge/pins"), "pull requests: diffs and their state when fetched"
    ),
    CacheKind("layers", ("layers",), "indexes of base image layers"),
    CacheKind("blobs", ("blobs",), "finished image layers"),
    CacheKind("sandboxes", ("sandbox",), "environments for verification"),
    CacheKind("programs", ("programs",), "programs of spark-build for other interpreters"),
    CacheKind("trees", ("trees",), "extracted Python files of targets"),
    CacheKind(
        "dsl", ("dsl/mirrors", "dsl/libraries"), "CuTe DSLs of targets, adapted to this machine"
    ),
    CacheKind("dispatch", ("dispatch",), "replies of vLLM about the kernels that it selects"),
    CacheKind(
        "preflight",
        ("preflight", "preflight/models"),
        "answers about whole models, and their configurations",
    ),
    CacheKind("codegen", ("codegen",), "results of compiled kernels"),
    CacheKind("numbers", ("numbers",), "results of kernels run without a GPU"),
    CacheKind("launches", ("launches",), "launches of kernels, recorded to be run without a GPU"),
    CacheKind("interfaces", ("interfaces",), "what `vllm serve` of releases understands"),
    CacheKind("binaries", ("binaries",), "summaries of compiled modules"),
    CacheKind("operators", ("operators",), "operator libraries from wheels"),
    CacheKind("sources", ("sources",), "source archives of releases"),
    CacheKind("headers", ("headers",), "headers for compiling", _HEADERS),
    CacheKind(
        "toolkits", ("toolkits",), "CUDA compilers from wheels, and facts about toolkit images"
    ),
    CacheKind("objects", ("objects",), "compiled units"),
    CacheKind("companions", ("companions",), "wheels with rebuilt kernels"),
    CacheKind(
        "elf",
        ("elf",),
        "symbols of libraries that extension wheels are checked against",
        _VERSIONED,
    ),
    CacheKind("engine-tests", ("engine-tests",), "the test suite's Docker Engine and images", None),
)
#: Other folders in the cache, which are not entries.
LOCKS = "locks"
OTHER = CacheKind("other", (), "unknown files", None)


def kinds_named(names: Sequence[str]) -> tuple[CacheKind, ...]:
    """The kinds with these names that may be pruned; all if no name is given.

    Raises:
        UsageError: the kind does not exist, or must not be removed.
    """
    known = {kind.name: kind for kind in KINDS}
    prunable = [kind.name for kind in KINDS if kind.prunable]
    for name in names:
        if name not in known:
            raise UsageError(
                f"no kind {name!r} in the cache{did_you_mean(name, known)}",
                hint=f"kinds: {', '.join(prunable)}",
            )
        if not known[name].prunable:
            raise UsageError(
                f"{name} are not removed by spark-build because a Docker Engine may be using them",
                hint="end the tests, then remove the folder that 'cache show' names by hand",
            )
    return tuple(known[name] for name in names or prunable)
