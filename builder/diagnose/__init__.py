"""Reads the log of a vLLM or TensorRT-LLM server: what it selected, what is wrong, what to do.

Known pitfalls are data (``builder/data/diagnose/``); advice depends on the release, because the
cure that is published for one release is often wrong for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import InvalidVersion, Version

from builder.diagnose.catalog import SEVERITIES, load_catalog
from builder.diagnose.entries import Entry, rendered
from builder.diagnose.reading import read_lines
from builder.diagnose.scan import Hit, Scan, scan
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from builder.diagnose.dispatch import Selection

DIAGNOSE_SCHEMA = 1


class Finding(NamedTuple):
    """One thing that a log shows, the line that shows it, and what to do about it."""

    id: str
    severity: str
    line: int
    message: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a log says.  ``vllm`` is empty when neither the log nor the caller tells."""

    vllm: str
    tensorrt_llm: str
    #: every vLLM release that the log names, more than one after an upgrade in place
    releases: tuple[str, ...]
    lines: int
    dispatch: tuple[Selection, ...]
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints."""
        return {
            "schema": DIAGNOSE_SCHEMA,
            "vllm": self.vllm,
            "tensorrt_llm": self.tensorrt_llm,
            "lines": self.lines,
            "dispatch": [selected._asdict() for selected in self.dispatch],
            "findings": [finding._asdict() for finding in self.findings],
        }


def diagnose(
    stream: BinaryIO, vllm: str | None = None, catalog: Sequence[Entry] | None = None
) -> Diagnosis:
    """Read a log; ``vllm`` is the release to judge it by, before what the log says.

    Raises:
        UsageError: ``vllm`` is not a version, or an entry of the catalogue is malformed.
    """
    if vllm is not None:
        try:
            vllm = str(Version(vllm.removeprefix("v")))
        except InvalidVersion:
            raise UsageError(f"--vllm {vllm!r} is not a version", hint="--vllm 0.25.0") from None
    entries = load_catalog() if catalog is None else catalog
    read = scan(read_lines(stream), entries)
    releases = tuple(v for v in sorted(read.versions, key=read.versions.__getitem__) if _valid(v))
    version = vllm or (releases[0] if releases else None)
    return Diagnosis(
        vllm=version or "",
        tensorrt_llm=next(iter(read.trtllm), ""),
        releases=releases,
        lines=read.lines,
        dispatch=tuple(sorted(read.selections.values(), key=lambda s: (s.line, s.kind))),
        findings=tuple(_findings(read, entries, version)),
    )


def _valid(version: str) -> bool:
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def _findings(read: Scan, entries: Sequence[Entry], version: str | None) -> list[Finding]:
    found: dict[tuple[str, str], Finding] = {}
    engine = "tensorrt-llm" if read.trtllm and not read.versions else "vllm"
    for entry in entries:
        if entry.engine not in (engine, "any"):
            continue
        if not read.holds(entry.required, every=True) or read.holds(entry.forbidden, every=False):
            continue
        hits = [*read.hits.get(entry.id, ()), *_asked(entry, read)]
        for hit in sorted(hits, key=lambda h: h.line):
            if not entry.applies(version, by_setting=hit.by_setting):
                continue
            message = rendered(entry.message, hit.groups)
            fix = rendered(entry.fix_for(version), hit.groups)
            finding = Finding(entry.id, entry.severity, hit.line, message, fix)
            found.setdefault((entry.id, message), finding)
    return sorted(found.values(), key=lambda f: (SEVERITIES.index(f.severity), f.line, f.id))


def _asked(entry: Entry, read: Scan) -> list[Hit]:
    """Hits of an entry's ``settings``."""
    return [
        Hit(setting.line, {"name": setting.name, "value": setting.value}, by_setting=True)
        for setting in read.settings.values()
        for asked in entry.settings
        if asked.holds(setting.name, setting.value)
    ]
