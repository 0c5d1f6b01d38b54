"""Read machine code without a GPU: ELF, fat binaries, SASS, PTX, and what SM121 can run.

A library has images: machine code (cubin) or PTX, each for one architecture.  ``cuobjdump`` (the
PyPI package ``nvidia-cuda-cuobjdump``, or a CUDA toolkit) lists and extracts them.  Instructions
come from ``nvdisasm`` (``nvidia-cuda-nvdisasm``, or a CUDA toolkit); registers, shared memory,
stack and names are in the cubin's ELF sections and need no tool.
"""

from __future__ import annotations

import errno
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping  # noqa: TC003 - a cache reads the type
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from builder.applier.machinecode import ABSENT, NO_CODE, RUNS, TRAP, UNLOADABLE, KernelCode
from builder.applier.trees import DirTree, OverlayTree
from builder.applier.values import canonical_json, sha256_hex
from builder.common.console import console
from builder.common.files import write_atomically
from builder.common.paths import cache_dir, package_file
from builder.errors import EngineError, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from builder.applier.layers import Kernels
    from builder.applier.trees import Tree


# ------------------------------------------------------------------------------------------- cubins


#: An instruction: its offset as a comment, an optional predicate, its name with modifiers.
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)",
    re.MULTILINE,
)
_TARGET = re.compile(r"^\s*\.target\s+(\S+)", re.MULTILINE)
#: Start of a function's code section.
_FUNCTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)

#: Attributes of ``.nv.info``: registers and stack frame by symbol number.
_REGISTERS, _FRAME = 0x2F, 0x11
_SIZED = 4  # the form of an attribute whose value follows, its size before it
_ELF = b"\x7fELF\x02\x01"  # 64 bits, little endian


#: What a tool says of a full disk.
_FULL = os.strerror(errno.ENOSPC)


class ToolMissing(SparkBuildError):
    """A tool of the CUDA toolkit is missing or cannot run, so machine code cannot be read."""


class BadCubin(SparkBuildError):
    """The bytes are not a cubin that can be read."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one kernel; shared memory is the static part."""

    kernel: str
    registers: int
    stack: int
    shared: int


@dataclass(frozen=True, kw_only=True)
class Disassembly:
    """Instructions of a cubin."""

    target: str
    counts: Mapping[str, int]

    def of(self, *prefixes: str, having: str = "") -> int:
        """The number of instructions with one of these prefixes and a given part."""
        return sum(
            number
            for name, number in self.counts.items()
            if name.startswith(prefixes) and (not having or having in name.split("."))
        )

    @property
    def tensor(self) -> dict[str, int]:
        """Tensor-core instructions by full name, the most frequent first."""
        counts = {n: c for n, c in self.counts.items() if n.partition(".")[0].endswith("MMA")}
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    @property
    def traps(self) -> int:
        """``BPT.TRAP``: in kernels built for another architecture."""
        return self.of("BPT.TRAP")

    @property
    def spills(self) -> int:
        """Loads and stores of local memory: register spills."""
        return self.of("LDL", "STL")


def parse_sass(text: str) -> Disassembly:
    """Count the instructions in the output of ``nvdisasm``."""
    target = _TARGET.search(text)
    counts = Counter(_INSTRUCTION.findall(text))
    return Disassembly(target=target[1] if target else "", counts=counts)


def split_functions(text: str) -> dict[str, Disassembly]:
    """The same for each function of a cubin, by mangled name."""
    target = _TARGET.search(text)
    parts = _FUNCTION.split(text)
    return {
        name: Disassembly(target=target[1] if target else "", counts=parse_sass(body).counts)
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def _check_not_stopped(tool: str, status: int, errors: str) -> None:
    """Raise if this machine stopped a tool, which says nothing about what it read.

    Raises:
        ToolMissing: it was killed, or the disk is full.
    """
    if status and _FULL in errors:
        raise ToolMissing(f"{tool} cannot run: {_FULL}", hint="spark-build cache show")
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        raise ToolMissing(
            f"{tool} was ended by signal {-status}; Linux does this where memory runs out",
            hint="run the same command again",
        )


def find_nvdisasm() -> Path:
    """The path of ``nvdisasm``."""
    return find_tool("nvdisasm")


def find_tool(name: str) -> Path:
    """A program of the CUDA toolkit: on PATH, in this environment, or in a toolkit.

    Raises:
        ToolMissing: the toolkit's program is in none of these.
    """
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    for folder in [*_package_folders(), *sorted(Path("/usr/local").glob("cuda*/bin"))]:
        program = folder / name
        if os.access(program, os.X_OK):
            return program
    raise ToolMissing(
        f"{name} is not installed; it is needed to read machine code",
        hint="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",  # on Linux they are there
    )


def _package_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(root).glob("*/bin"))


@lru_cache(maxsize=64)  # a proof of necessity reads the same cubins once for each layer
def disassemble(cubin: bytes) -> Disassembly:
    """Count the instructions of a cubin.

    Raises:
        ToolMissing: ``nvdisasm`` is missing.
        BadCubin: ``nvdisasm`` cannot read the cubin.
    """
    return parse_sass(listing(cubin))


def listing(cubin: bytes) -> str:
    """The output of ``nvdisasm`` for a cubin.

    Raises:
        ToolMissing: ``nvdisasm`` is missing.
        BadCubin: ``nvdisasm`` cannot read the cubin.
    """
    tool = find_nvdisasm()
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        file = Path(scratch) / "kernel.cubin"
        try:
            file.write_bytes(cubin)
            answer = subprocess.run(
                [str(tool), "-c", str(file)], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ToolMissing(f"{tool} cannot run: {error.strerror}") from error
    _check_not_stopped("nvdisasm", answer.returncode, answer.stderr)
    if answer.returncode != 0:
        raise BadCubin(f"nvdisasm refuses the cubin: {answer.stderr.strip()[:300]}")
    return answer.stdout


def function_names(cubin: bytes) -> set[str]:
    """Mangled names of the functions with code in a cubin.

    Raises:
        BadCubin: the bytes are not such a file.
    """
    try:
        names = {name for name, _ in _sections(cubin)}
    except (struct.error, ValueError, IndexError) as error:
        raise BadCubin(f"not a cubin that can be read ({error})") from error
    return {name.removeprefix(".text.") for name in names if name.startswith(".text.")}


def resources(cubin: bytes) -> list[Resources]:
    """Registers, stack and static shared memory of each kernel, from the cubin's sections.

    Raises:
        BadCubin: the bytes are not such a file.
    """
    try:
        sections = dict(_sections(cubin))
        names = _symbols(sections)
        attributes = list(_attributes(sections[".nv.info"].data))
    except (struct.error, KeyError, ValueError, IndexError) as error:
        raise BadCubin(f"not a cubin that can be read ({error})") from error
    of_kind: dict[int, dict[str, int]] = {_REGISTERS: {}, _FRAME: {}}
    for kind, symbol, value in attributes:
        if kind in of_kind and f".text.{names[symbol]}" in sections:
            of_kind[kind][names[symbol]] = value
    return [
        Resources(
            kernel=kernel,
            registers=registers,
            stack=of_kind[_FRAME].get(kernel, 0),
            shared=sections[shared].size if (shared := f".nv.shared.{kernel}") in sections else 0,
        )
        for kernel, registers in sorted(of_kind[_REGISTERS].items())
    ]


@dataclass(frozen=True)
class _Section:
    size: int
    data: bytes


def _sections(cubin: bytes) -> Iterator[tuple[str, _Section]]:
    if not cubin.startswith(_ELF):
        raise ValueError("no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * n) for n in range(count)]
    names = headers[names_at][4]
    for name, kind, _flags, _address, offset, length in headers:
        start = names + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        empty = kind == 8  # NOBITS: has a size, and nothing in the file
        yield text, _Section(length, b"" if empty else cubin[offset : offset + length])


def _symbols(sections: Mapping[str, _Section]) -> dict[int, str]:
    table, strings = sections[".symtab"].data, sections[".strtab"].data
    names = {}
    for number in range(len(table) // 24):
        (start,) = struct.unpack_from("<I", table, 24 * number)
        names[number] = strings[start : strings.index(b"\0", start)].decode()
    return names


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    position = 0
    while position + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == _SIZED:
            if size == 8:
                symbol, value = struct.unpack_from("<II", info, position)
                yield kind, symbol, value
            position += size


# ---------------------------------------------------------------------------------------- libraries


#: Compute capability of the GB10.
GB10 = (12, 1)
#: File name patterns of cubins that may load there, for ``cuobjdump -xelf``.
_NEAR = f"sm_{GB10[0]}"
#: Bytes per read from ``cuobjdump -ptx``: one of these modules has 700 MB of PTX.
_CHUNK = 8 << 20

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")
_IMAGE = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = (\S+)", re.MULTILINE)
#: Kernel names in the output of CUDA 12's and CUDA 13's tools.
_KERNEL = re.compile(
    r"^(?:STT_FUNC +\S+ +STO_ENTRY|FUNC +\S+ +\S+ +ENTRY) +(?:U +)?(\S+)$", re.MULTILINE
)
#: In PTX: the next image, the next kernel, relevant instructions.  One
#: pattern each: one that begins with a literal is searched for ten times faster than a choice.
_PTX = {
    "arch": re.compile(rb"Fatbin ptx code:\n=+\narch = (\S+)"),
    "kernel": re.compile(rb"\.entry ([\w$.]+)"),
    "mma": re.compile(rb"(mma\.sync\.[\w.:]+)"),
    "convert": re.compile(rb"(cvt\.[\w.]*e2m1[\w.]*)"),
    "trap": re.compile(rb"(trap);"),
}


class BadBinary(SparkBuildError):
    """The device code of a library cannot be listed."""


@dataclass(frozen=True, order=True)
class Arch:
    """An architecture as NVIDIA's tools write it: ``sm_120``, ``sm_120a``, ``sm_120f``."""

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Arch:
        """From ``sm_120f``.

        Raises:
            BadBinary: it is not of that form.
        """
        match = _ARCH.fullmatch(text)
        if not match:
            raise BadBinary(f"unknown architecture {text!r}")
        return cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    def loads_on(self, device: tuple[int, int] = GB10) -> bool:
        """Whether a device loads machine code for this: CUDA's rules of binary compatibility.

        Plain and family (``f``) code runs on later devices of the same major version; code for one
        chip (``a``) runs only there.
        """
        if self.suffix == "a":
            return (self.major, self.minor) == device
        return self.major == device[0] and self.minor <= device[1]

    def compiles_on(self, device: tuple[int, int] = GB10) -> bool:
        """Whether a device's driver compiles PTX for this: plain PTX works on all later devices."""
        if self.suffix:
            return self.loads_on(device)
        return (self.major, self.minor) <= device


Kind = Literal["elf", "ptx"]


@dataclass(frozen=True, kw_only=True)
class Image:
    """One image: its kernels by mangled name, with instructions that show real code, if read.

    Machine code is not read at first; ``code_of`` does that for a few kernels.
    """

    kind: Kind
    arch: Arch
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def images(file: Path) -> list[Image]:
    """Every image in a library; empty without device code.

    Raises:
        ToolMissing: ``cuobjdump`` is missing.
        BadBinary: it cannot read the file.
    """
    symbols = _run(["-symbols", str(file)])
    if symbols is None:
        return []
    if "FUNC" in symbols and not _KERNEL.search(symbols):
        raise BadBinary(f"cuobjdump printed an unknown format for {file.name}")
    parts = _IMAGE.split(symbols)
    cubins = [
        Image(kind="elf", arch=Arch.parse(arch), kernels={k: {} for k in _KERNEL.findall(body)})
        for kind, arch, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
        if kind == "elf"
    ]
    return cubins + list(parse_ptx(_stream(["-ptx", str(file)])))


def parse_ptx(chunks: Iterable[bytes]) -> Iterator[Image]:
    """The PTX images in the output of ``cuobjdump -ptx``, with counts of relevant instructions."""
    arch: Arch | None = None
    kernels: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for chunk in _whole_images(chunks):
        marks = [
            (match.start(), what, match[1].decode())
            for what, pattern in _PTX.items()
            for match in pattern.finditer(chunk)
        ]
        for _, what, word in sorted(marks):
            if what == "arch":
                if arch is not None:
                    yield Image(kind="ptx", arch=arch, kernels=kernels)
                arch, kernels = Arch.parse(word), {}
            elif what == "kernel":
                counts = kernels.setdefault(word, Counter())
            else:
                counts[word] += 1
    if arch is not None:
        yield Image(kind="ptx", arch=arch, kernels=kernels)


def _whole_images(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, split at empty lines, which never occur inside a header or an instruction."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        cut = rest.rfind(b"\n\n") + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    yield rest


def code_of(
    file: Path,
    wanted: Callable[[str], bool],
    keep: Callable[[Mapping[str, int]], dict[str, int]] | None = None,
) -> dict[str, dict[str, int]]:
    """The machine code of some kernels that a GB10 loads, as counts of relevant instructions.

    Args:
        file: a library or an object file.
        wanted: the kernels, by mangled name.
        keep: the instructions; None means those of ``telling``.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is missing.
        BadBinary: the file cannot be parsed.
        BadCubin: ``nvdisasm`` cannot read a cubin of it.
    """
    codes: dict[str, dict[str, int]] = {}
    best: dict[str, Arch] = {}
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        module = Path(scratch) / "module.so"  # the name of the library goes into every name
        module.symlink_to(file.resolve())
        _run(["-xelf", _NEAR, str(module)], cwd=Path(scratch))
        for path in sorted(Path(scratch).glob("*.cubin")):
            arch = Arch.parse(path.name.split(".")[-2])
            cubin = path.read_bytes() if arch.loads_on() else b""
            path.unlink()
            if not cubin or not any(wanted(name) for name in function_names(cubin)):
                continue
            for name, code in split_functions(listing(cubin)).items():
                if wanted(name) and arch >= best.get(name, arch):
                    best[name], codes[name] = arch, (keep or telling)(code.counts)
    return codes


def telling(counts: Mapping[str, int]) -> dict[str, int]:
    """Instructions that distinguish real code from a stub."""
    return {
        name: number
        for name, number in counts.items()
        if name.partition(".")[0].endswith("MMA")
        or "E2M1" in name.split(".")
        or name.startswith("BPT.TRAP")
    }


def _run(arguments: list[str], cwd: Path | None = None) -> str | None:
    """The output of ``cuobjdump``; None if the file has no such device code."""
    try:
        answer = subprocess.run(
            [str(find_tool("cuobjdump")), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            check=False,
        )
    except OSError as error:
        raise ToolMissing(f"cuobjdump cannot run: {error.strerror}") from error
    output = f"{answer.stdout[-4000:]}\n{answer.stderr[-4000:]}"
    if "does not contain device code" in output or "No ELF file found" in output:
        return None
    _check_not_stopped("cuobjdump", answer.returncode, answer.stderr)
    if answer.returncode != 0:
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit status {answer.returncode}"]
        raise BadBinary(f"cuobjdump cannot read {Path(arguments[-1]).name}: {last[0][:300]}")
    return answer.stdout


def _stream(arguments: list[str]) -> Iterator[bytes]:
    """The same as a stream, for long output."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [str(find_tool("cuobjdump")), *arguments], stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        while chunk := process.stdout.read(_CHUNK):
            yield chunk
        errors.seek(0)
        stderr = errors.read(_CHUNK).decode(errors="replace")
    _check_not_stopped("cuobjdump", process.returncode, stderr)
    if process.returncode != 0:
        raise BadBinary(f"cuobjdump cannot list the PTX of {Path(arguments[-1]).name}")


# ------------------------------------------------------------------------------- extension modules
#
# A module has 10 to 400 MB and is often in a wheel on the index, so it is read once: the summary is
# cached by the module's sha256.

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
    paths: list[str] = []
    tops = {pattern.partition("/")[0] for pattern in _OURS}
    names = tree.children("")
    pending = sorted({n for top in tops for n in fnmatch.filter(names, top)}, reverse=True)
    while pending:
        path = pending.pop()
        if path.endswith(".so"):
            paths += [path] if any(fnmatch.fnmatch(path, pattern) for pattern in _OURS) else []
        elif "." not in PurePosixPath(path).name:
            pending.extend(f"{path}/{name}" for name in reversed(tree.children(path)))
    return paths


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
            return load_summary(json.loads(self._cache_file(path).read_bytes()), path)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # none, or one of another form: read the module

    def _make(self, path: str) -> Summary:
        console.detail(f"reading the device code of {path}")
        with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
            file = on_disk(self._tree, path, Path(scratch))
            summary = summarise(file, path, self._symbols)
        write_atomically(self._cache_file(path), json.dumps(asdict(summary)).encode())
        return summary

    def _cache_file(self, path: str) -> Path:
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
    every_image = images(file)
    machine, ptx = best(every_image, "elf"), best(every_image, "ptx")
    every = {name: image.arch for image in every_image for name in image.kernels}
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
        archs = sorted({image.arch for image in every_image if name in image.kernels})
        return KernelSummary(kernel=name, how="none", arch=" ".join(map(str, archs)), counts={})

    return Summary(
        path=path,
        elf=tally(every_image, "elf"),
        ptx=tally(every_image, "ptx"),
        total=len(every),
        native=len(machine),
        jit=len(set(ptx) - set(machine)),
        readings={symbol: tuple(map(read, names)) for symbol, names in wanted.items()},
    )


def best(candidates: Sequence[Image], kind: str) -> dict[str, Image]:
    """Kernel -> the image that SM121 uses: the latest usable architecture."""
    chosen: dict[str, Image] = {}
    for image in sorted((i for i in candidates if i.kind == kind), key=lambda i: i.arch):
        usable = image.arch.loads_on() if kind == "elf" else image.arch.compiles_on()
        if usable:
            chosen.update(dict.fromkeys(image.kernels, image))
    return chosen


def tally(every_image: Sequence[Image], kind: str) -> dict[str, list[int]]:
    """Architecture -> number of images, number of kernels."""
    rows: dict[Arch, list[int]] = {}
    for image in every_image:
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


# --------------------------------------------------------------------- symbols of a shared library

#: Numbers of the ELF format (System V gABI, chapter 4): binding, and the index of a symbol's
#: version, whose highest bit means hidden.
_WEAK, _LOCAL = 2, 0
_VERSION_BITS = 0x7FFF
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclass(frozen=True, kw_only=True)
class ElfFacts:
    """One shared library."""

    #: as in ``uname -m``
    machine: str
    #: sonames, in order
    needed: tuple[str, ...]
    #: required symbol -> its library and version, such as
    #: ``("libc.so.6", "GLIBC_2.14")``; empty strings without a version
    undefined: Mapping[str, tuple[str, str]]
    exported: frozenset[str]
    #: library -> required versions
    versions: Mapping[str, tuple[str, ...]]


def read_elf(path: Path) -> ElfFacts:
    """Read a shared library's dynamic section and symbols, but no code.

    Raises:
        UsageError: it is not a shared library that can be read.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as stream:
            file: Any = ELFFile(stream)
            dynamic = file.get_section_by_name(".dynamic")
            if dynamic is None or file.elfclass != 64 or not file.little_endian:
                raise UsageError(f"{path} is not a shared library of a 64-bit machine")
            needed = tuple(
                tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"
            )
            versions, numbers = _versions(file)
            undefined, exported = _dynamic_symbols(file, numbers)
            machine = _MACHINES.get(file["e_machine"], file["e_machine"])
    except (ELFError, OSError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path} is not a shared library that can be read: {error}") from None
    return ElfFacts(
        machine=machine,
        needed=needed,
        undefined=undefined,
        exported=frozenset(exported),
        versions=versions,
    )


def _versions(file: Any) -> tuple[dict[str, tuple[str, ...]], dict[int, tuple[str, str]]]:
    """Versions by library, and by version index."""
    section = file.get_section_by_name(".gnu.version_r")
    versions: dict[str, tuple[str, ...]] = {}
    numbers: dict[int, tuple[str, str]] = {}
    for library, rows in section.iter_versions() if section else ():
        needs = [(row.name, row.entry.vna_other) for row in rows]
        versions[library.name] = tuple(sorted(name for name, _ in needs))
        numbers.update({number: (library.name, name) for name, number in needs})
    return versions, numbers


def _dynamic_symbols(
    file: Any, numbers: Mapping[int, tuple[str, str]]
) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Undefined and exported symbols, parsed as bytes: a library of torch has 100 000."""
    table = file.get_section_by_name(".dynsym")
    if table is None:
        return {}, set()
    strings = file.get_section(table["sh_link"]).data()
    marks = file.get_section_by_name(".gnu.version")
    number = _numbers(marks.data() if marks else b"")
    undefined: dict[str, tuple[str, str]] = {}
    exported = set()
    for place, info, _, section in struct.iter_unpack("<IBBH16x", table.data()):
        mark = next(number)
        if not place or info >> 4 == _LOCAL:
            continue
        name = strings[place : strings.index(b"\0", place)].decode()
        if section:
            exported.add(name)
        elif info >> 4 != _WEAK:
            undefined[name] = numbers.get(mark & _VERSION_BITS, ("", ""))
    return undefined, exported


def _numbers(marks: bytes) -> Iterator[int]:
    yield from (mark for (mark,) in struct.iter_unpack("<H", marks))
    while True:
        yield 0
