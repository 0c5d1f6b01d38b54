"""The JSON document for the in-image verifier: what it checks on a GPU.

The tables behind it stay where people edit them: ``builder/data/kernels.toml`` and the catalogue of
log lines in ``builder/data/diagnose/``.  Only what concerns the plan's own release is put in.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from builder.diagnose.catalog import load_catalog
from builder.diagnose.entries import SKIPPED
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.diagnose.entries import Condition, Entry, RequestedSetting
    from builder.documents.plan import PlanDocument

DEVICE_SCHEMA = 1


@lru_cache(maxsize=1)
def _kernels() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(package_file("data", "kernels.toml").read_text("utf-8"))["kernel"])


#: Layers that a profile is not for: how its settings leave them is a matter of ``dispatch`` alone.
OTHER_LAYERS = frozenset({"fp8-block", "w4a16-linear", "w4a16-moe"})


def known_kinds() -> tuple[str, ...]:
    """Kinds of layer that can be run on a device."""
    return tuple(dict.fromkeys(str(kernel["kind"]) for kernel in _kernels()))


def kernel_for(kind: str, line: str, vllm: str) -> dict[str, Any]:
    """What is known of the kernel that an expected line names; ``line`` is the whole line.

    A kind that cannot be run has no shapes.
    """
    for kernel in _kernels():
        ranged = kernel.get("when")
        if ranged and not SpecifierSet(ranged).contains(vllm, prereleases=True):
            continue
        if kernel["kind"] == kind and re.search(kernel["line"], line):
            kept = {key: value for key, value in kernel.items() if key != "when"}
            return {"roundings": 1, **kept, "line": line}
    bare = {"kind": kind, "line": line, "names": [], "never": []}
    return {**bare, "activations": "", "shapes": [], "roundings": 1}


def settings_of(plan: PlanDocument) -> dict[str, str]:
    """Variables and flags that the plan sets, by the names that the catalogue asks for them."""
    settings = dict(plan.env)
    flags = [*plan.serve_flags, *plan.moe_serve_flags]
    for flag, value in itertools.pairwise([*flags, "--"]):
        if flag.startswith("--"):
            name, equals, own = flag[2:].partition("=")
            given = own if equals else "" if value.startswith("--") else value
            settings[name.replace("-", "_")] = given
    return settings


def _held(asked: Sequence[RequestedSetting], settings: Mapping[str, str], *, every: bool) -> bool:
    facts = [any(a.holds(name, value) for name, value in settings.items()) for a in asked]
    return all(facts) if every else any(facts)


def _sources(condition: Condition) -> list[str]:
    return [pattern.regex.pattern for pattern in condition.patterns]


def marker(entry: Entry, vllm: str) -> dict[str, Any]:
    """An entry of the catalogue as the verifier in an image reads it."""
    return {
        "id": entry.id,
        "severity": entry.severity,
        "patterns": [pattern.regex.pattern for pattern in entry.patterns],
        "unless": [
            *(regex.pattern for regex in entry.unless),
            *([SKIPPED.pattern] if entry.severity == "error" else []),
        ],
        "with": _sources(entry.required),
        "without": _sources(entry.forbidden),
        "message": entry.message,
        "fix": entry.fix_for(vllm),
    }


def markers(plan: PlanDocument) -> list[dict[str, Any]]:
    """Lines that must not be in this release's log: entries that show by a line, notes left out.

    What an entry asks of settings is answered here, from what the plan sets.
    """
    vllm = plan.base.packages.get("vllm", "")
    settings = settings_of(plan)
    chosen = []
    for entry in load_catalog():
        if entry.engine == "tensorrt-llm" or entry.severity == "info" or not entry.patterns:
            continue
        if entry.times > 1 or entry.passing:  # a server that gets ready has passed it
            continue
        if not entry.applies(vllm or None, by_setting=False):
            continue
        if not _held(entry.required.settings, settings, every=True):
            continue
        if _held(entry.forbidden.settings, settings, every=False):
            continue
        chosen.append(marker(entry, vllm))
    return chosen


def device_data(plan: PlanDocument, image: str = "IMAGE") -> dict[str, Any]:
    """The document for a plan; ``image`` is what commands in messages name."""
    vllm = plan.base.packages.get("vllm", "")
    return {
        "schema": DEVICE_SCHEMA,
        "vllm": vllm,
        "command": f"docker run --rm --gpus all --ipc host --entrypoint spark-verify {image}",
        "kinds": list(known_kinds()),
        "kernels": [
            kernel_for(e.kind, e.line, vllm)
            for e in plan.expect
            if e.line and e.kind not in OTHER_LAYERS
        ],
        "markers": markers(plan),
    }
