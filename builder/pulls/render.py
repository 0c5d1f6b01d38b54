"""Renders pinned pull requests as layers, with all content inlined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.errors import UsageError
from builder.forge.reference import parse_pull
from builder.pulls.parts import Parts, take_apart
from builder.pulls.projects import mapped, project_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.applier.opkinds import Pull
    from builder.documents.pulls import Pin
    from builder.forge.normalize import Section

Table = dict[str, Any]

#: After layers that replace whole distributions (10 to 40), before those that edit vLLM (50).
ORDER = 45
#: Names that a note lists at most.
_LISTED = 6
#: Distributions whose CUDA sources a stage can compile, and their architectures.
_COMPILED, _ARCH = "vllm", "12.1a"


def parts_of(
    pin: Pin,
    sections: Sequence[Section],
    op: Pull,
    package: str = "",
) -> Parts:
    """Split a pinned diff with the description of its repository, or of its op.

    Raises:
        UsageError: it is unknown which of its files are installed.
    """
    repository = op.project or pin.repository
    project = project_of(repository, [section.path for section in sections])
    if op.map:
        project = mapped(project, repository, package, op.map)
    if project is None:
        raise UsageError(
            f"{pin.request}: no changed file is in a folder that matches {pin.repository}: "
            f"{_some([section.path for section in sections])}; a layer can name the folders with "
            "'map', or for a fork the upstream repository with 'project'",
            hint="spark-build layers new NAME --from-pr PULL",
        )
    return take_apart(pin.request, sections, project, op.include, op.exclude)


def ops_of(pin: Pin, parts: Parts, when: Mapping[str, str] | None = None) -> list[Table]:
    """The ops for a pull request; ``when`` is the condition of the replaced op."""
    source = {
        "repository": pin.repository,
        "number": pin.number,
        "commit": pin.commit,
        "sha256": pin.sha256,
    }
    dropped = [list(row) for row in parts.dropped]
    common: Table = {"file": pin.request, "pull": source}
    ops: list[Table] = []
    for layout, sections in parts.installed:
        if sections:
            text = b"".join(section.render() for section in sections).decode("utf-8")
            op = {"op": "diff", **common, "diff": text, "dropped": dropped}
            ops.append(_conditional(op, {**(when or {}), **layout.when}))
    if parts.compiled:
        ops.append(_conditional({**_compile_op(pin, parts), **common}, when or {}))
    late = parts.late()
    if late:
        brought = parts.project.prebuilt_by
        op = {"op": "compile", **common, "files": list(late), "diff": ""}
        op["reason"] = (
            f"{_some(late)} comes compiled from {brought}, and a change to the source has no effect"
        )
        ops.append(_conditional(op, {**(when or {}), brought: ">=0"}))
    return ops


def _compile_op(pin: Pin, parts: Parts) -> Table:
    """The op for compiled sources; with ``source``, a compile stage can build it."""
    paths = [section.path for section in parts.compiled]
    text = b"".join(s.render() for s in parts.compiled if not s.special).decode("utf-8")
    op: Table = {"op": "compile", "files": paths, "diff": text}
    op["reason"] = f"{_some(paths)} reach {parts.project.package} compiled"
    special = next((s for s in parts.compiled if s.special), None)
    if special is not None:
        op["reason"] += f"; {special.path} is {special.special}"
    elif parts.project.package == _COMPILED:
        op |= {"source": _COMPILED, "arch": _ARCH, "name": parse_pull(pin.request).layer_name}
    return op


def _conditional(op: Table, when: Mapping[str, str]) -> Table:
    return {**op, "if": dict(when)} if when else op


def notes_of(pin: Pin, parts: Parts) -> list[str]:
    """Notes in the plan about an applied pull request."""
    notes = []
    known = parts.project
    if known.described and known.repository.lower() != pin.repository.lower():
        notes.append(f"{pin.repository} is read as a fork of {known.repository}")
    if parts.dropped:
        names = [path for path, _ in parts.dropped]
        notes.append(f"{pin.request}: not installed, so dropped: {_some(names)}")
    if parts.late():
        late = _some(parts.late())
        notes.append(f"{pin.request}: {late} are compiled at first use")
    return notes


def merged_entry(pin: Pin, package: str) -> Table | None:
    """A layer's entry about its merged change: the first release with it, and its reference."""
    if not pin.release or not pin.merge_commit:
        return None
    return {
        "when": {package: f">={pin.release}"},
        "since": f"{package} {pin.release}",
        "reason": f"merged as {pin.merge_commit[:12]}, which is in {package} {pin.release} and "
        "later; this base has changed there since",
    }


def layer_of(pin: Pin, parts: Parts, name: str, after: Sequence[str]) -> Table:
    """The layer for a pull request from the command line."""
    package = parts.project.package
    every = {package: ">=0"}
    ops = ops_of(pin, parts)
    layer: Table = {
        "name": name,
        "summary": f"{pin.request}: {pin.title}" if pin.title else pin.request,
        "order": ORDER,
        "after": list(after),
        "package": package,
        "provenance": provenance(pin),
        "upstream": [],
        "not-applicable": [],
        "variants": [{"name": pin.short, "when": every, "notes": notes_of(pin, parts), "ops": ops}],
        "pins": {"wheel": [], "donor": []},
        "series": pin.repository.lower(),
    }
    if not ops:
        reason = f"none of its files is installed: {_some([path for path, _ in parts.dropped])}"
        layer["not-applicable"] = [{"when": every, "reason": reason}]
    merged = merged_entry(pin, package)
    return {**layer, "merged": merged} if merged else layer


def provenance(pin: Pin) -> Table:
    """The origin of a pull request in DEP-3 fields."""
    kind = "pull request" if pin.number else "commit"
    value: Table = {
        "origin": f"upstream, {pin.repository} {kind} "
        f"{pin.number or pin.short}{f', {pin.url}' if pin.url else ''}",
        "forwarded": "not-needed",
        "applied-upstream": "no",
        "last-update": pin.date,
    }
    if pin.number:
        value["bug"] = [f"{pin.repository}#{pin.number}"]
    if pin.merge_commit:
        value["applied-upstream"] = f"{pin.release or 'merged'}, {pin.merge_commit}"
    return value


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
