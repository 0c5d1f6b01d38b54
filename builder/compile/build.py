"""Compiles selected translation units of a release.

An interrupted run continues where it stopped: objects are kept in the cache, in a folder
named by the digest of all inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.applier.digests import canonical_json, sha256_hex
from builder.compile.cost import cost_of_units
from builder.compile.executor import SOURCE, Compilation
from builder.errors import UsageError
from builder.util.console import console
from builder.util.locks import locked
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.compile.changes import SourceChange
    from builder.compile.cmake import BuildRecipe, Unit
    from builder.compile.includes import Sources
    from builder.compile.toolchain import Toolchain

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
