"""Changes to a source tree: a built-in one, or a unified diff."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import field

from builder.applier.diff import parse_diff
from builder.applier.hunks import apply_hunks
from builder.applier.opkinds import Compile, TextChange
from builder.applier.states import AMBIGUOUS, DRIFT
from builder.applier.values import keys_of
from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean
from builder.util.documents import Part, Text, plain, read
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.applier.layers import Layer
    from builder.compile.includes import Sources


@dataclass(frozen=True, kw_only=True)
class SourceChange:
    """New texts of some files of a source tree; empty if there is nothing to change."""

    name: str
    texts: Mapping[str, bytes]
    #: first release that has the change, if known
    upstream: str = ""


class KnownChange(Part, frozen=True, kw_only=True):
    """A change in ``builder/data/compile.toml``, which documents the keys."""

    name: Text
    files: tuple[Text, ...]
    old: Text
    new: Text
    guard: Text
    applied_upstream: str = field(name="applied-upstream")
    kernel: Text
    guards: dict[str, str]
    units: tuple[Text, ...]


class UnitCost(Part, frozen=True, kw_only=True):
    """The cost to compile units that match a pattern."""

    unit: Text
    seconds: float
    gigabytes: float


class _CompileData(Part, frozen=True, kw_only=True):
    change: tuple[KnownChange, ...]
    cost: tuple[UnitCost, ...]


@cache
def _data() -> _CompileData:
    text = package_file("data", "compile.toml").read_text("utf-8")
    return read(tomllib.loads(text), _CompileData)


def known_changes() -> dict[str, KnownChange]:
    """The built-in changes by name."""
    return {change.name: change for change in _data().change}


def rendered_change(name: str) -> dict[str, Any]:
    """A built-in change in rendered form: its text, and its kernels.

    Raises:
        UsageError: it does not exist, or has no kernel whose machine code can be judged.
    """
    from builder.machinecode.kernels import load_kernels

    change = _known(name)
    kernel = next(kernel for kernel in load_kernels() if kernel.name == change.kernel)
    fields = {key: value for key, value in plain(change).items() if key in keys_of(TextChange)}
    code = {
        "name": kernel.name,
        "modules": list(kernel.modules),
        "symbol": kernel.symbol,
        "guards": dict(change.guards),
    }
    return {"change": fields, "code": code}


def _known(name: str) -> KnownChange:
    changes = known_changes()
    if name not in changes:
        raise UsageError(
            f"unknown source change {name!r}{did_you_mean(name, changes)} "
            f"(known: {', '.join(changes)}; --patch takes a diff)",
            hint=f"--change {next(iter(changes))}",
        )
    return changes[name]


def cost_of(unit: str) -> tuple[float, float]:
    """The cost to compile a unit, in seconds and gigabytes: measured, or estimated."""
    row = next(row for row in _data().cost if fnmatch(Path(unit).name, row.unit))
    return row.seconds, row.gigabytes


def estimate_of(name: str) -> str:
    """The estimated cost of a built-in change, without its sources."""
    known = known_changes().get(name)
    costs = [cost_of(unit) for unit in (known.units if known else ("*",))]
    minutes = max(1, round(sum(seconds for seconds, _ in costs) / 60))
    largest = max(gigabytes for _, gigabytes in costs)
    count = f"{len(costs)} unit{'s' if len(costs) != 1 else ''}"
    return (
        f"{count}, about {minutes} min if the units are compiled one after another, "
        f"{largest:.0f} GB of "
        "memory, and g++"
    )


def image_of(release: str) -> str:
    """The official image of a release, which has torch with CUDA on both architectures."""
    return f"docker://vllm/vllm-openai:v{release}"


def compile_ops(layer: Layer) -> list[Compile]:
    """The ops of a layer that compile a built-in change."""
    return [op for op in layer.ops if isinstance(op, Compile) and op.change]


def stage_name(ops: Iterable[Compile]) -> str:
    """The name of a stage that compiles several ops together."""
    return "-".join(dict.fromkeys(op.change_name for op in ops))


def named_change(sources: Sources, name: str) -> SourceChange:
    """A built-in change for this tree; without texts if the tree already has it.

    Raises:
        UsageError: no such change.
        SparkBuildError: the tree has neither the old form nor the new one (drift, exit 4).
    """
    return changed_by(sources, _known(name))


def changed_by(sources: Sources, change: TextChange | KnownChange) -> SourceChange:
    """A change for this tree; without texts if the tree already has it.

    Raises:
        SparkBuildError: the tree has neither the old form nor the new one (drift, exit 4).
    """
    name = change.name
    old, new = change.old.encode(), change.new.encode()
    found = {p: t for p, t in sources.texts.items() if p.endswith(tuple(change.files))}
    texts = {path: text.replace(old, new) for path, text in found.items() if old in text}
    if not texts and not any(new in text for text in found.values()):
        raise SparkBuildError(
            f"{name}: none of {', '.join(change.files)} in this source tree holds "
            f"{change.old!r} or {change.new!r}",
            Exit.DRIFT,
        )
    return SourceChange(name=name, texts=texts, upstream=change.applied_upstream)


def patched(sources: Sources, patch: Path) -> SourceChange:
    """A unified diff applied to this tree: exact context, unique position, no fuzz.

    Raises:
        UsageError: the file cannot be read, or changes a file that is not C++ or CUDA.
        SparkBuildError: a hunk does not match exactly once (drift or ambiguous, exit 4).
    """
    try:
        files = parse_diff(patch.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {patch}: {error}") from None
    texts = {}
    for file in files:
        path = file.path
        if file.old != file.new or path not in sources.texts:
            raise UsageError(f"{patch}: {path} is not a source file of this tree")
        text = sources.texts[path].decode("utf-8")
        state, changed, _ = apply_hunks(text, file.hunks)
        if state in (DRIFT, AMBIGUOUS):
            raise SparkBuildError(
                f"{patch}: {path}: {state}: {changed}",
                Exit.DRIFT,
                hint="create the diff against this release's source archive",
            )
        if changed != text:
            texts[path] = changed.encode()
    return SourceChange(name=patch.name, texts=texts)
