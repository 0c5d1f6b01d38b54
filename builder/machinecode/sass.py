"""The contents of a cubin: instructions by name, registers, shared memory, spills.

Instructions come from ``nvdisasm`` (the PyPI package ``nvidia-cuda-nvdisasm``, or a CUDA toolkit);
registers, shared memory, stack and names are in the cubin's ELF sections and need no tool.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class ToolMissing(SparkBuildError):
    """A tool of the CUDA toolkit is missing, so machine code cannot be read."""


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
        found = {n: c for n, c in self.counts.items() if n.partition(".")[0].endswith("MMA")}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

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


def find_nvdisasm() -> Path:
    """The path of ``nvdisasm``."""
    return find_tool("nvdisasm")


def find_tool(name: str) -> Path:
    """A program of the CUDA toolkit: on PATH, in this environment, or in a toolkit.

    Raises:
        ToolMissing: it is missing.
    """
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    for folder in [*_package_folders(), *sorted(Path("/usr/local").glob("cuda*/bin"))]:
        found = folder / name
        if os.access(found, os.X_OK):
            return found
    raise ToolMissing(
        f"{name} is not installed; it is needed to read machine code",
        hint="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",  # on Linux they are there
    )


def _package_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(root).glob("*/bin"))


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
        file.write_bytes(cubin)
        try:
            answer = subprocess.run(
                [str(tool), "-c", str(file)], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ToolMissing(f"{tool} cannot run: {error.strerror}") from error
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
    found = {}
    for number in range(len(table) // 24):
        (start,) = struct.unpack_from("<I", table, 24 * number)
        found[number] = strings[start : strings.index(b"\0", start)].decode()
    return found


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
