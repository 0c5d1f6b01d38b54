"""The prebuilt extension modules of a target: their kernels, and how SM121 runs them.

A module has 10 to 400 MB and is often in a wheel on the index, so it is read once: the summary is
cached by the module's sha256.
"""

from __future__ import annotations

import fnmatch
import json
import re
import tempfile
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from builder.applier.compiled import KernelCode
from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.machinecode import ABSENT, NO_CODE, RUNS, TRAP, UNLOADABLE
from builder.applier.trees import DirTree, OverlayTree
from builder.common.console import console
from builder.common.machinecode.devicecode import Arch, ToolMissing, code_of, images
from builder.common.paths import cache_dir, package_file
from builder.common.pypi.index import write_atomically
from builder.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.applier.opkinds import Kernels
    from builder.applier.trees import Tree
    from builder.common.machinecode.devicecode import Image

# ------------------------------------------------------------------------------------ known kernels


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A prebuilt kernel, from ``builder/data/binaries.toml``, which documents the fields."""

    name: str
    behind: str
    modules: tuple[str, ...]
    symbol: str
    cure: str
    #: the instruction that shows real code: its prefix, then required parts
    holds: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """The expectation as text."""
        real = f"each holds {' of '.join(self.holds)}" if self.holds else "none is only a trap"
        return f"SM121 runs every one of them; {real}"

    def tells(self, instruction: str, how: str) -> bool:
        """Whether an instruction shows that it is real."""
        first, *rest = (self.ptx if how == "jit" else self.holds) or ("?",)
        return instruction.startswith(first) and set(rest) <= set(instruction.split("."))

    def is_real(self, reading: KernelSummary) -> bool:
        """Whether one of its instances is the real kernel and not a stub."""
        if not self.holds:
            return not any(map(is_trap, reading.counts))
        return any(self.tells(name, reading.how) for name in reading.counts)


def is_trap(instruction: str) -> bool:
    """Whether an instruction of SASS or PTX ends the kernel."""
    return instruction.startswith(("BPT.TRAP", "trap"))


def load_kernels() -> list[Kernel]:
    """All kernels in the table."""
    raw = tomllib.loads(package_file("data", "binaries.toml").read_text("utf-8"))
    return [
        Kernel(
            name=row["name"],
            behind=row["behind"],
            modules=tuple(row["modules"]),
            symbol=row["symbol"],
            cure=row["cure"],
            holds=tuple(row.get("holds", ())),
            ptx=tuple(row.get("ptx", ())),
        )
        for row in raw["kernel"]
    ]


# ------------------------------------------------------------------------------------------ modules


#: Version of the summaries in the cache.
_SCHEMA = 1
#: Modules to read: vLLM's, FlashInfer's prebuilt ones for this chip family, and
#: extension wheels'.
_OURS = ("vllm/*.so", "flashinfer_jit_cache/*12[01]*/*.so", "spark_build_companion_*/*.so")


@runtime_checkable
class Extracts(Protocol):
    """A tree that can stream a file to disk."""

    def extract(self, path: str, target: Path) -> None:
        """Write one file."""


@dataclass(frozen=True, kw_only=True)
class KernelSummary:
    """How SM121 runs one kernel, and its relevant instructions."""

    kernel: str
    #: ``native``, ``jit`` (the driver compiles PTX), or ``none``
    how: str
    #: the architecture it runs; for ``none`` the existing ones
    arch: str
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The device code of one module."""

    path: str
    #: architecture -> images and kernels of it
    elf: Mapping[str, Sequence[int]]
    ptx: Mapping[str, Sequence[int]]
    #: kernels by name: all, those SM121 loads, those its driver compiles
    total: int
    native: int
    jit: int
    #: symbol pattern -> the kernels that match it
    readings: Mapping[str, Sequence[KernelSummary]]

    @property
    def ways(self) -> dict[str, int]:
        """Numbers of kernels by how SM121 runs them; empty without device code."""
        rest = self.total - self.native - self.jit
        ways = {"natively": self.native, "compiled by the driver from PTX": self.jit}
        return {**ways, "not at all": rest} if self.total else {}


def find_modules(tree: Tree) -> list[str]:
    """Paths of the modules in a tree that may have kernels for SM121."""
    found: list[str] = []
    tops = {pattern.partition("/")[0] for pattern in _OURS}
    names = tree.children("")
    pending = sorted({n for top in tops for n in fnmatch.filter(names, top)}, reverse=True)
    while pending:
        path = pending.pop()
        if path.endswith(".so"):
            found += [path] if any(fnmatch.fnmatch(path, pattern) for pattern in _OURS) else []
        elif "." not in PurePosixPath(path).name:
            pending.extend(f"{path}/{name}" for name in reversed(tree.children(path)))
    return found


def on_disk(tree: Tree, path: str, folder: Path) -> Path:
    """A file of any tree as a file on disk, in ``folder`` unless it is already on disk."""
    if isinstance(tree, OverlayTree) and path not in tree.changes:
        return on_disk(tree.base, path, folder)
    if isinstance(tree, DirTree):
        return Path(tree.root) / path
    target = folder / PurePosixPath(path).name
    if isinstance(tree, Extracts):
        tree.extract(path, target)
    else:
        target.write_bytes(tree.read(path) or b"")
    return target


class Modules:
    """Summaries of a target's modules, each created once."""

    def __init__(
        self, tree: Tree, symbols: Sequence[str], digests: Mapping[str, str] | None = None
    ) -> None:
        """``digests`` are sha256 of modules, if known without reading them."""
        self._digests = digests or {}
        self.paths = find_modules(tree)
        self._tree = tree
        self._symbols = sorted(set(symbols))
        self._key = sha256_hex(canonical_json([_SCHEMA, self._symbols]))[:12]
        #: summaries so far
        self.read: dict[str, Summary] = {}

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Modules by path patterns, in the patterns' order."""
        return [p for pattern in patterns for p in self.paths if fnmatch.fnmatch(p, pattern)]

    def summary(self, path: str) -> Summary:
        """The summary of a module.

        Raises:
            ToolMissing: ``cuobjdump`` or ``nvdisasm`` is missing.
            BadBinary: the module's device code cannot be listed.
            BadCubin: a cubin in it cannot be disassembled.
            RemoteError: a wheel on the index cannot be read.
        """
        if path not in self.read:
            self.read[path] = self._cached(path) or self._make(path)
        return self.read[path]

    def _cached(self, path: str) -> Summary | None:
        try:
            return load_summary(json.loads(self._kept(path).read_bytes()), path)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # none, or one of another form: read the module

    def _make(self, path: str) -> Summary:
        console.detail(f"reading the device code of {path}")
        with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
            file = on_disk(self._tree, path, Path(scratch))
            made = summarise(file, path, self._symbols)
        write_atomically(self._kept(path), json.dumps(asdict(made)).encode())
        return made

    def _kept(self, path: str) -> Path:
        digest = self._digests.get(path) or self._tree.digest(path)
        return cache_dir() / "binaries" / f"{digest}-{self._key}.json"


def load_summary(raw: Mapping[str, object], path: str) -> Summary:
    """A summary from the cache, for a module that may have another path."""
    values = {**raw, "path": path}
    rows: Mapping[str, list[dict[str, object]]] = raw["readings"]  # type: ignore[assignment]
    values["readings"] = {
        symbol: tuple(KernelSummary(**row) for row in readings)  # type: ignore[arg-type]
        for symbol, readings in rows.items()
    }
    return Summary(**values)  # type: ignore[arg-type]


def summarise(file: Path, path: str, symbols: Sequence[str]) -> Summary:
    """Read a module: all kernels by name, and the instructions of those that match a symbol."""
    found = images(file)
    machine, ptx = best(found, "elf"), best(found, "ptx")
    every = {name: image.arch for image in found for name in image.kernels}
    patterns = {symbol: re.compile(symbol) for symbol in symbols}
    wanted = {
        symbol: sorted(name for name in every if pattern.search(name))
        for symbol, pattern in patterns.items()
    }
    near = {name for names in wanted.values() for name in names if name in machine}
    code = code_of(file, near.__contains__) if near else {}

    def read(name: str) -> KernelSummary:
        if name in machine:
            return KernelSummary(
                kernel=name, how="native", arch=str(machine[name].arch), counts=code.get(name, {})
            )
        if name in ptx:
            image = ptx[name]
            counts = dict(image.kernels[name])
            return KernelSummary(kernel=name, how="jit", arch=str(image.arch), counts=counts)
        archs = sorted({image.arch for image in found if name in image.kernels})
        return KernelSummary(kernel=name, how="none", arch=" ".join(map(str, archs)), counts={})

    return Summary(
        path=path,
        elf=tally(found, "elf"),
        ptx=tally(found, "ptx"),
        total=len(every),
        native=len(machine),
        jit=len(set(ptx) - set(machine)),
        readings={symbol: tuple(map(read, names)) for symbol, names in wanted.items()},
    )


def best(found: Sequence[Image], kind: str) -> dict[str, Image]:
    """Kernel -> the image that SM121 uses: the latest usable architecture."""
    chosen: dict[str, Image] = {}
    for image in sorted((i for i in found if i.kind == kind), key=lambda i: i.arch):
        usable = image.arch.loads_on() if kind == "elf" else image.arch.compiles_on()
        if usable:
            chosen.update(dict.fromkeys(image.kernels, image))
    return chosen


def tally(found: Sequence[Image], kind: str) -> dict[str, list[int]]:
    """Architecture -> number of images, number of kernels."""
    rows: dict[Arch, list[int]] = {}
    for image in found:
        if image.kind == kind:
            row = rows.setdefault(image.arch, [0, 0])
            row[0] += 1
            row[1] += len(image.kernels)
    return {str(arch): rows[arch] for arch in sorted(rows)}


# --------------------------------------------------------------------------------------- one module


def read_module(tree: Tree, path: str, wanted: Kernels, digest: str = "") -> KernelCode:
    """The facts of a module, from its instructions; cached by the module's sha256.

    Args:
        tree: the module's tree; from a wheel on the index only the module is read.
        path: the module.
        wanted: the ``code`` of a rendered ``compile`` op.
        digest: the module's sha256, if it is known without reading the module.

    Raises:
        EngineError: ``cuobjdump`` or ``nvdisasm`` is missing.
        BadBinary: the module's device code cannot be listed.
        RemoteError: the wheel cannot be read.
    """
    modules = Modules(tree, [wanted.symbol], {path: digest} if digest else {})
    try:
        summary = modules.summary(path)
    except ToolMissing as error:
        raise EngineError(
            f"{path} of this base is unknown, and its architectures cannot be read: {error}",
            hint=error.hint,
        ) from error
    readings = summary.readings[wanted.symbol]
    if not readings:
        return KernelCode(ABSENT if summary.elf or summary.ptx else NO_CODE)
    kernel = next(k for k in load_kernels() if k.name == wanted.name)
    if any(reading.how == "none" for reading in readings):
        how = UNLOADABLE
    elif not all(map(kernel.is_real, readings)):
        how = TRAP
    else:
        how = RUNS
    archs = {arch for reading in readings for arch in reading.arch.split()}
    guards = {g for g in wanted.guards if any(g in reading.kernel for reading in readings)}
    return KernelCode(how, " ".join(sorted(archs)), " ".join(sorted(guards)))
