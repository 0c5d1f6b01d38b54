"""CUDA C++ host code without a GPU: compiled from the sources of a release, and asked.

`cuda_host.cpp` stands in for the CUDA runtime and prints each launch.  Left out is what asks the
device: it says what a GB10 is, with fewer multiprocessors where a block shall have several tiles,
and tensor maps have what the executor reads of them.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.ptx.launchfile import APART, FIRST, Array, LaunchFile

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

#: FlashInfer's own flags for SM121, and one by which CUTLASS calls the function for tensor maps by
#: its name.
FLAGS = (
    "-arch=compute_121a", "-code=compute_121a", "-std=c++17", "-O3", "--expt-relaxed-constexpr",
    "-DENABLE_BF16", "-DENABLE_FP4", "-DCUTLASS_ENABLE_GDC_FOR_SM100=1", "-w",
    "-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1",
    "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",
)  # fmt: skip
INCLUDES = (
    "include", "csrc", "cutlass/include", "cutlass/tools/util/include", "csrc/nv_internal",
    "csrc/nv_internal/include", "spdlog/include", "cccl/include",
)  # fmt: skip
#: Tables of curand, which none of these kernels names.
TABLES = re.compile(
    r"^\.(?:global|const) [^=;]*(?:precalc|mrg32k3a|__cr_)\w*\[[^;]*;\n", re.MULTILINE
)
_ENTRY = re.compile(r"^(?:\.visible |\.weak )?\.entry\s+([\w$]+)", re.MULTILINE)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)[^\[\],)]*(?:\[(\d+)\])?")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of what compiles FlashInfer's sources."""
    parser.add_argument("flashinfer", type=Path, help="the folder flashinfer of a wheel")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--include", type=Path, action="append", default=[])
    parser.add_argument("--orders", action="store_true", help="leave out barriers, one at a time")
    parser.add_argument("--mutants", type=int, default=0, help="of each small launch's kernel")


@dataclass(frozen=True)
class Compiler:
    """Compiles into folders of ``work`` what is missing or older than its source."""

    work: Path
    #: the command, without source and output
    words: tuple[str, ...]

    @classmethod
    def of_flashinfer(
        cls, options: argparse.Namespace, flags: Iterable[str] = (), includes: Iterable[str] = ()
    ) -> Compiler:
        """With FlashInfer's flags and headers, and more of both."""
        data = (options.flashinfer / "data" / one for one in (*INCLUDES, *includes))
        places = (f"-I{one}" for one in (*data, *options.include))
        return cls(options.work, ("nvcc", *FLAGS, *flags, *places))

    def compiled(self, folder: str, source: Path, *flags: str) -> Path:
        """The object file of a source; beside it is its PTX."""
        result = self.work / folder / f"{source.stem}.o"
        if not _is_newer(result, source):
            result.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                [*self.words, *flags, "--keep", "--keep-dir", result.parent, "-c", source,
                 "-o", result], check=True,
            )  # fmt: skip
        return result

    def linked(self, folder: str, objects: Iterable[Path]) -> Built:
        """The program of some objects and of the runtime."""
        program = self.work / folder / "program"
        objects = [*objects, self.compiled("host", Path(__file__).with_suffix(".cpp"))]
        if not all(_is_newer(program, one) for one in objects):
            subprocess.run(["g++", *objects, "-o", program], check=True)
        texts = (one.with_suffix(".ptx") for one in objects)
        parts = (TABLES.sub("\n", one.read_text("utf-8")) for one in texts if one.exists())
        return Built(program, tuple(parts))


def _is_newer(result: Path, source: Path) -> bool:
    return result.exists() and result.stat().st_mtime >= source.stat().st_mtime


def kernels_alone(ptx: str) -> dict[str, str]:
    """A module's PTX by kernel, each with what the module declares before the first."""
    starts = [*_ENTRY.finditer(ptx)]
    ends = [*(one.start() for one in starts), len(ptx)]
    return {
        one[1]: ptx[: ends[0]] + ptx[one.start() : ends[number + 1]]
        for number, one in enumerate(starts)
    }


@dataclass(frozen=True)
class Built:
    """A program that makes launches, and the PTX of its parts."""

    program: Path
    parts: tuple[str, ...]

    @cached_property
    def kernels(self) -> dict[str, str]:
        """The PTX of each kernel alone."""
        return {name: text for part in self.parts for name, text in kernels_alone(part).items()}

    @cached_property
    def sizes(self) -> str:
        """A line for each kernel: its name, and the bytes of its parameters."""
        lines = []
        for name, text in self.kernels.items():
            begin = text.index("(", text.index(name))
            given = _PARAMETER.findall(text, begin, text.index(")", begin))
            sizes = (int(count or 1) * int(kind[1:]) // 8 for kind, count in given)
            lines.append(" ".join(map(str, (name, *sizes))))
        return "\n".join(lines)

    def printed(self, words: Iterable[object], processors: int, **more: str) -> list[Any]:
        """What the program prints, as JSON a line; ``processors`` is the device's number, and
        ``more`` what the host code finds in its environment.
        """
        done = subprocess.run(
            [self.program, *map(str, words)], check=True, capture_output=True, text=True,
            input=self.sizes, env={"MULTIPROCESSORS": str(processors), **more},
        )  # fmt: skip
        return [json.loads(line) for line in done.stdout.splitlines()]

    def launch(self, name: str, line: Any, memory: tuple[Array, ...]) -> LaunchFile:
        """A launch that was printed; of memory that the host fills, without a kernel."""
        if "fill" in line:
            given = (line["address"], line["fill"], line["bytes"])
            data = tuple(int(one).to_bytes(8, "little") for one in given)
            return LaunchFile(name, "", "", (1, 1, 1), (1, 1, 1), 0, data, memory)
        kernel = line["kernel"]
        return LaunchFile(
            name, self.kernels[kernel], kernel, tuple(line["grid"]), tuple(line["block"]),
            line["shared"], tuple(map(bytes.fromhex, line["parameters"])), memory,
        )  # fmt: skip


def placed(contents: Mapping[str, bytes], *writable: str) -> list[Array]:
    """Arrays one after the other, of which some are written to."""
    address, memory = FIRST, []
    for name, data in contents.items():
        memory.append(Array(name, address, data, name in writable, "u8", (len(data),)))
        address += -(-len(data) // APART) * APART + APART
    return memory
