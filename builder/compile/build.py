"""Compiles units of a release: what it costs, the objects, and their machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.console import console
from builder.common.document import Count, Part, Seconds, Text
from builder.common.hints import CACHE
from builder.common.machinecode import disassemble, find_tool
from builder.common.paths import cache_dir
from builder.compile.costs import Cost, cost_of_units, free_memory
from builder.compile.executor import SOURCE, Compilation
from builder.errors import BuildFailed, EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.compile.changes import SourceChange
    from builder.compile.sources import BuildRecipe, Sources, Unit
    from builder.compile.toolchain import Toolchain

# --------------------------------------------------------------------------------------------- cost


#: Below this share of a unit's measured memory, memory is clearly too small.
_CLEARLY = 0.75


def refuse_machine(cost: Cost, memory: float, disk: float, place: Path) -> None:
    """Refuse, before anything starts, what this machine clearly cannot compile.

    Args:
        cost: the estimated cost.
        memory: free gigabytes of memory and swap.
        disk: free gigabytes at ``place``.
        place: where the cache is.

    Raises:
        EngineError: memory or disk space is clearly too small.
    """
    if memory < cost.least * _CLEARLY:
        raise EngineError(
            f"compiling takes {cost.least:.1f} GB of memory for one unit, and {memory:.1f} GB of "
            "memory and swap are free here",
            hint="stop other programs, add swap, or use a machine with more memory",
        )
    if disk < cost.disk:
        raise EngineError(
            f"compiling takes {cost.disk:.1f} GB of disk, and {place} has {disk:.1f} GB left",
            hint=f"free some space, or {CACHE}",
        )


def free_here() -> tuple[float, float, Path]:
    """Free gigabytes of memory with swap, and of the cache's disk; and the cache's path."""
    swap = re.search(r"^SwapFree: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    place = cache_dir()
    while not place.exists():
        place = place.parent
    memory = free_memory() + (int(swap[1]) / 1e6 if swap else 0.0)
    return memory, shutil.disk_usage(place).free / 1e9, place


# ------------------------------------------------------------------------------------------ objects


#: Flags of vLLM's build for nvcc, besides torch's and the release's.
FLAGS = (
    "-std=c++17", "-O2", "-DNDEBUG", "-DENABLE_FP8", "-DUSE_CUDA",
    "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xcompiler", "-fPIC",
)  # fmt: skip
#: Suffixes of host sources, whatever the build's lists say.
HOST_SUFFIXES = (".cpp", ".cc", ".c")


@dataclass(frozen=True, kw_only=True)
class BuiltUnit:
    """An object file.  ``seconds`` is its compile time."""

    unit: Unit
    object: Path
    seconds: float


def compile_units(
    sources: Sources,
    recipe: BuildRecipe,
    units: Sequence[Unit],
    change: SourceChange | None,
    tools: Toolchain,
    jobs: int | None = None,
    *,
    with_host: bool = False,
) -> list[BuiltUnit]:
    """Compile units of a source tree, changed or not, for the recipe's architectures.

    Host code has no machine code for a GPU to show, and is refused unless ``with_host``.

    Raises:
        UsageError: there is no unit to compile, or one is not a CUDA source.
        EngineError: ninja is missing.
        BuildFailed: a unit does not compile; the message has its first error.
    """
    if not units:
        raise UsageError("the changed files affect no compiled unit")
    host = [unit.path for unit in units if not unit.gencodes]
    if host and not with_host:
        raise UsageError(f"{', '.join(host)} is host code, not GPU code")
    where = tools.compiler.where
    texts = dict(change.texts) if change else {}
    # a generated header counts if one of the units includes it
    reached = frozenset[str]().union(*(sources.closure(unit.path) for unit in units))
    left_out = set(sources.generated) - set(recipe.units) - reached
    counted = {p: t for p, t in {**sources.texts, **texts}.items() if p not in left_out}
    key = sha256_hex(
        canonical_json(
            [
                {path: sha256_hex(text) for path, text in counted.items()},
                [command(recipe, unit, tools, Path()) for unit in units],
                *where.identity(tools.includes),
            ]
        )
    )
    work = cache_dir() / "objects" / key[:24]
    with locked(f"objects {key}"):
        _lay_out(work / SOURCE, sources, texts)
        at_once = tools.compiler.at_once(jobs)
        cost = cost_of_units([unit.path for unit in units], jobs=at_once)
        console.say(f"  {cost.brief}")
        source = where.source(work)
        batch = [
            Compilation(path=unit.path, words=tuple(command(recipe, unit, tools, source)))
            for unit in units
        ]
        seconds = where.compile(work, batch, cost.jobs, tools.includes)
    return [
        BuiltUnit(unit=unit, object=work / one.object, seconds=seconds.get(one.object, 0.0))
        for unit, one in zip(units, batch, strict=True)
    ]


def command(recipe: BuildRecipe, unit: Unit, tools: Toolchain, source: Path) -> list[str]:
    """The compiler's arguments for one unit, without input and output."""
    extension, where = recipe.extensions[unit.extension], tools.compiler.where
    headers = where.folders(tools.includes)
    words = [str(tools.compiler.nvcc), *where.host.words, *FLAGS]
    words += [flag for flag in recipe.flags if flag.startswith("-D")]
    words += [f"-D{name}" for name in extension.definitions]
    for virtual, real in unit.gencodes:
        words += ["-gencode", f"arch={virtual},code={real}"]
    words += [f"-I{source / 'csrc'}", *(f"-I{folder}" for folder in headers)]
    if unit.path.endswith(HOST_SUFFIXES):  # the release compiles these without nvcc
        words += ["-Xcompiler", "-U__NVCC__"]
    # messages have file names: objects must not depend on the cache's path
    return [*words, "-Xcompiler", f"-fmacro-prefix-map={where.root}/="]


def _lay_out(folder: Path, sources: Sources, texts: dict[str, bytes]) -> None:
    """Write only changed files, so that ninja sees what is new."""
    for path, text in {**sources.texts, **texts}.items():
        target = folder / path
        if not target.is_file() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)


# ------------------------------------------------------------------------------------- machine code


class MachineCode(Part, frozen=True, kw_only=True):
    """One cubin of an object file, or of a library."""

    target: str
    tensor: Annotated[dict[str, Count], Meta(description="tensor-core instructions by name")]
    traps: Count

    @property
    def verdict(self) -> str:
        """Whether and how a GB10 would run it."""
        if self.tensor:
            return "real code" if not self.traps else f"real code and {self.traps} traps"
        return f"every kernel is a trap ({self.traps})" if self.traps else "no tensor-core code"


class CompiledUnit(Part, frozen=True, kw_only=True):
    """A compiled unit and its machine code."""

    path: Text
    extension: Text
    object: Text
    size: Annotated[Count, Meta(description="bytes")]
    seconds: Seconds
    code: tuple[MachineCode, ...]

    @classmethod
    def of(cls, built: BuiltUnit) -> CompiledUnit:
        """Read a built unit's machine code.

        Raises:
            ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
            BuildFailed: the object has no readable machine code.
        """
        return cls(
            path=built.unit.path,
            extension=built.unit.extension,
            object=str(built.object),
            size=built.object.stat().st_size,
            seconds=round(built.seconds, 1),
            code=tuple(machine_code(built.object)),
        )

    @property
    def shows_trap(self) -> bool:
        """Whether a cubin has only traps."""
        return any(code.traps and not code.tensor for code in self.code)


def machine_code(file: Path) -> list[MachineCode]:
    """Every cubin in an object file.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
        BuildFailed: the file has no readable machine code.
    """
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        done = subprocess.run(
            [str(find_tool("cuobjdump")), "-xelf", "all", str(file.resolve())],
            cwd=scratch, capture_output=True, text=True, check=False,
        )  # fmt: skip
        cubins = sorted(Path(scratch).glob("*.cubin"))
        if done.returncode or not cubins:
            message = (done.stderr or done.stdout).strip()[:300]
            raise BuildFailed(f"{file} has no machine code: {message}")
        codes = [disassemble(cubin.read_bytes()) for cubin in cubins]
    return [
        MachineCode(target=code.target, tensor=dict(code.tensor), traps=code.traps)
        for code in codes
    ]
