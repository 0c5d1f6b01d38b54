"""What the in-image verifier checks on a GPU: kernels, and log lines that must not appear."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import field, structs
from packaging.specifiers import SpecifierSet

from builder.applier.judging import flag_values
from builder.applier.values import canonical_json, sha256_hex
from builder.common.document import Part, always, plain, read
from builder.common.files import read_entry, write_entry
from builder.common.leftovers import keep_latest
from builder.common.paths import cache_dir, code_digest, package_file
from builder.images.engines.maker import written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.common.plan import PlanDocument
    from builder.diagnose.entries import Condition, Entry, RequestedSetting


class DeviceKernel(Part, frozen=True, kw_only=True):
    """A kernel behind an expected log line, and the layers to run it with."""

    kind: str
    line: str
    #: patterns for names of CUDA kernels that must run, and that must not run
    names: tuple[str, ...]
    never: tuple[str, ...]
    activations: str
    shapes: tuple[tuple[int, ...], ...]
    #: number of roundings of a result
    roundings: int = always(1)


class Marker(Part, frozen=True, kw_only=True):
    """A catalogue entry for the verifier in an image, with patterns as strings."""

    id: str
    severity: str
    patterns: tuple[str, ...]
    unless: tuple[str, ...]
    required: tuple[str, ...] = field(name="with")
    forbidden: tuple[str, ...] = field(name="without")
    message: str
    fix: str


class DeviceData(Part, frozen=True, kw_only=True):
    """The data of the in-image verifier for the plan's release."""

    schema: Literal[1] = always(1)
    vllm: str
    command: str
    kinds: tuple[str, ...]
    kernels: tuple[DeviceKernel, ...]
    markers: tuple[Marker, ...]


class _KnownKernel(DeviceKernel, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of ``kernels.toml``; its ``line`` is a pattern."""

    #: vLLM releases; empty means all
    when: str = ""


@lru_cache(maxsize=1)
def _kernels() -> tuple[_KnownKernel, ...]:
    table = tomllib.loads(package_file("data", "kernels.toml").read_text("utf-8"))
    return read(table["kernel"], tuple[_KnownKernel, ...])


#: Kinds of layer that a profile does not target; only level ``dispatch`` checks them.
OTHER_LAYERS = frozenset({"fp8-block", "w4a16-linear", "w4a16-moe"})


def known_kinds() -> tuple[str, ...]:
    """Kinds of layer that can be run on a device."""
    return tuple(dict.fromkeys(kernel.kind for kernel in _kernels()))


def kernel_for(kind: str, line: str, vllm: str) -> DeviceKernel:
    """The known kernel for an expected log line.

    A kind that cannot be run has no shapes.
    """
    for kernel in _kernels():
        if kernel.when and not SpecifierSet(kernel.when).contains(vllm, prereleases=True):
            continue
        if kernel.kind == kind and re.search(kernel.line, line):
            return read(plain(structs.replace(kernel, line=line)), DeviceKernel)
    return DeviceKernel(kind=kind, line=line, names=(), never=(), activations="", shapes=())


def settings_of(plan: PlanDocument) -> dict[str, str]:
    """Variables and flags that the plan sets, by the names that the catalogue uses."""
    settings = dict(plan.env)
    for flag, value in flag_values([*plan.serve_flags, *plan.moe_serve_flags]):
        settings[flag[2:].replace("-", "_")] = value or ""
    return settings


def _holds(asked: Sequence[RequestedSetting], settings: Mapping[str, str], *, every: bool) -> bool:
    facts = [any(a.holds(name, value) for name, value in settings.items()) for a in asked]
    return all(facts) if every else any(facts)


def _sources(condition: Condition) -> tuple[str, ...]:
    return tuple(pattern.regex.pattern for pattern in condition.patterns)


def marker(entry: Entry, vllm: str) -> Marker:
    """Convert a catalogue entry for the verifier in an image."""
    from builder.diagnose.entries import SKIPPED

    skipped = (SKIPPED.pattern,) if entry.severity == "error" else ()
    return Marker(
        id=entry.id,
        severity=entry.severity,
        patterns=tuple(pattern.regex.pattern for pattern in entry.patterns),
        unless=(*(regex.pattern for regex in entry.unless), *skipped),
        required=_sources(entry.required),
        forbidden=_sources(entry.forbidden),
        message=entry.message,
        fix=entry.fix_for(vllm),
    )


#: The code that reads the catalogue, and the markers that are kept: one release has about 80 kB.
_MARKING = ("diagnose/entries.py", "images/engines/devicedata.py")
_MARKERS = 60


def markers(plan: PlanDocument) -> tuple[Marker, ...]:
    """Log lines that must not appear for this release: entries with a line pattern, without notes.

    Conditions on settings are evaluated here, against what the plan sets.
    """
    settings = settings_of(plan)
    return _markers(plan.base.packages.get("vllm", ""), tuple(sorted(settings.items())))


@lru_cache(maxsize=8)
def _markers(vllm: str, given: tuple[tuple[str, str], ...]) -> tuple[Marker, ...]:
    """The markers, kept by the digests of the catalogue and of the code that reads it."""
    parts = [code_digest(_MARKING), dict(written()), vllm, given]
    path = cache_dir() / "markers" / f"{sha256_hex(canonical_json(parts))}.json"
    with suppress(OSError, ValueError):
        return msgspec.json.decode(read_entry(path), type=tuple[Marker, ...])
    chosen = _chosen_markers(vllm, given)
    write_entry(path, msgspec.json.encode(chosen))
    keep_latest(path.parent.glob("*.json"), most=_MARKERS)
    return chosen


def _chosen_markers(vllm: str, given: tuple[tuple[str, str], ...]) -> tuple[Marker, ...]:
    from builder.diagnose.entries import load_entries

    settings = dict(given)
    chosen = []
    for entry in load_entries():
        if entry.engine == "tensorrt-llm" or entry.severity == "info" or not entry.patterns:
            continue
        if entry.times > 1 or entry.passing:  # a server that gets ready has passed it
            continue
        if not entry.applies(vllm or None, by_setting=False):
            continue
        if not _holds(entry.required.settings, settings, every=True):
            continue
        if _holds(entry.forbidden.settings, settings, every=False):
            continue
        chosen.append(marker(entry, vllm))
    return tuple(chosen)


def device_data(plan: PlanDocument, image: str = "IMAGE") -> DeviceData:
    """The document for a plan; ``image`` is the image's name in hinted commands."""
    vllm = plan.base.packages.get("vllm", "")
    return DeviceData(
        vllm=vllm,
        command=f"docker run --rm --gpus all --ipc host --entrypoint spark-verify {image}",
        kinds=known_kinds(),
        kernels=tuple(
            kernel_for(e.kind, e.line, vllm)
            for e in plan.expect
            if e.line and e.kind not in OTHER_LAYERS
        ),
        markers=markers(plan),
    )
