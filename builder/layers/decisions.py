"""Decisions about layers on released wheels, and where the text stands that decides them.

They are kept in one small file of the cache.  A decision depends on the layers up to it, the sha256
of the wheels, the platform, and the code that judges: nothing else, so it is never made twice.
Which wheels a release has depends on what the index says about them.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from functools import cache
from itertools import islice
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from builder.applier.diff import first_line, nearest_line, parse_diff
from builder.applier.edits import top_level
from builder.applier.judging import judge_in_order, probe_holds
from builder.applier.layers import Copy, Diff, Env, Graft, Hook, Replace, counts
from builder.applier.states import AMBIGUOUS, APPLIED, DRIFT, NOT_APPLICABLE, UPSTREAM
from builder.applier.trees import OverlayTree, versions
from builder.applier.values import all_match, canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.document import Count, Part, Text
from builder.common.files import write_atomically
from builder.common.paths import cache_dir, code_digest
from builder.common.plan import State
from builder.images.subject import tracked_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.applier.judging import Step
    from builder.applier.layers import Clause, Layer, Op, Variant
    from builder.applier.sources import Sources
    from builder.applier.states import Outcome
    from builder.applier.trees import Tree
    from builder.common.plan import BaseIdentity, Platform
    from builder.common.pypi import PackageIndex
    from builder.images.subject import Subject
    from builder.layers.catalog import Selection


# ------------------------------------------------------------------ where the deciding text stands


#: Places that a decision names; a layer with more files has them in its folder.
_LONGEST = 6
#: Characters of an anchor.
_LONG = 160

Kind = Literal["old", "new", "probe", "absent", "file"]


class Evidence(Part, frozen=True, kw_only=True):
    """One place of a release that decided a state."""

    file: Annotated[Text, Meta(description="below site-packages")]
    found: Annotated[
        Kind,
        Meta(
            description="old: the text that the layer replaces; new: the text that it would write; "
            "probe: the release's own form of it; absent: it is not there; file: the whole file"
        ),
    ]
    anchor: Annotated[str, Meta(description="the line that was looked for")] = ""
    line: Annotated[Count, Meta(description="where it stands, from 1; 0 if it is not there")] = 0
    sha256: Annotated[
        str, Meta(description="of the file as the layer finds it; empty if there is none")
    ] = ""


def evidence_of(layer: Layer, outcome: Outcome, tree: Tree) -> tuple[Evidence, ...]:
    """The places that decided; ``tree`` has the layers before this one, but not this one."""
    packages = versions(tree)
    if outcome.state == NOT_APPLICABLE:
        return ()
    if outcome.state == UPSTREAM:
        known = [e for e in layer.upstream if all_match(e.when, packages)]
        probed = next((e for e in known if probe_holds(e.probe, tree)), None)
        if probed is not None:
            return tuple(_of_probe(probed.probe, tree))[:_LONGEST]
    if outcome.state in (DRIFT, AMBIGUOUS) and outcome.variant is None:
        known = [e for e in layer.upstream if all_match(e.when, packages)]
        return tuple(_of_probe(known[0].probe, tree))[:_LONGEST] if known else ()
    variant = _variant(layer, outcome, packages)
    ops = [op for op in variant.ops if counts(op, packages)] if variant else []
    return tuple(place for op in ops for place in _of_op(op, tree))[:_LONGEST]


#: Of a diff: lines around a change, hunks and lines that are shown, lines that are compared.
_CONTEXT, _HUNKS, _SHOWN, _COMPARED = 3, 2, 60, 20_000


def around(old: bytes | None, new: bytes | None, anchors: Sequence[str]) -> str:
    """The hunks of a unified diff with one of these lines, else the first; "" if nothing changed.

    A file that one side lacks is said in words.
    """
    if old == new:
        return ""
    if old is None or new is None:
        return "the file is new\n" if old is None else "the file is gone\n"
    before, after = (data.decode("utf-8", "replace").splitlines() for data in (old, new))
    if len(before) + len(after) > _COMPARED:
        return "the file changed; it is too long to be compared here\n"
    hunks: list[list[str]] = []
    for line in islice(difflib.unified_diff(before, after, n=_CONTEXT, lineterm=""), 2, None):
        if line.startswith("@@"):
            hunks.append([])
        hunks[-1].append(line)
    near = [hunk for hunk in hunks if any(a in line for a in anchors for line in hunk)]
    shown = [line for hunk in (near or hunks)[:_HUNKS] for line in _outdented(hunk)]
    rest = len(hunks) - min(len(near or hunks), _HUNKS)
    more = [f"and {rest} more places of this file"] if rest else []
    return "\n".join([*shown[:_SHOWN], *more]) + "\n"


def _outdented(hunk: Sequence[str]) -> list[str]:
    """A hunk without the indentation that all its lines have."""
    head, *lines = hunk
    body = dedent("\n".join(line[1:] for line in lines)).split("\n")
    return [head, *(line[0] + text for line, text in zip(lines, body, strict=True))]


def _variant(layer: Layer, outcome: Outcome, packages: Mapping[str, str]) -> Variant | None:
    named = [v for v in layer.variants if v.name == outcome.variant]
    return next(iter(named or (v for v in layer.variants if all_match(v.when, packages))), None)


def _of_probe(probe: Iterable[Clause], tree: Tree) -> Iterator[Evidence]:
    for clause in probe:
        text = _text(tree, clause.file)
        wanted = clause.contains or clause.lacks or ""
        line = 0 if text is None else _line(text, wanted)
        kind: Kind = "file" if not wanted and text is not None else "probe" if line else "absent"
        yield _place(tree, clause.file, kind, wanted, line)


def _of_op(op: Op, tree: Tree) -> Iterator[Evidence]:
    for file, old, new in _anchors(op, tree):
        text = _text(tree, file)
        if text is None:
            yield _place(tree, file, "absent", _changed(old, new) or _changed(new, old), 0)
        elif not old and not new:
            yield _place(tree, file, "file", "", 0)
        else:
            yield _decided(tree, file, text, old, new)


def _decided(tree: Tree, file: str, text: str, old: str, new: str) -> Evidence:
    """Which of both texts the file has; of two that it has, the longer one is the truth."""
    order: list[tuple[Kind, str, str]] = [("new", new, old), ("old", old, new)]
    if old and new in old:
        order.reverse()
    for kind, wanted, other in order:
        if wanted and (start := text.find(wanted)) >= 0:
            anchor = _changed(wanted, other)
            within = wanted.find(anchor) if anchor else 0
            return _place(tree, file, kind, anchor, text.count("\n", 0, start + within) + 1)
    anchor = _changed(old, new) or _changed(new, old)
    near = nearest_line(text, anchor).partition(":")[0]
    return _place(tree, file, "absent", anchor, int(near or 0))


def _anchors(op: Op, tree: Tree) -> Iterator[tuple[str, str, str]]:
    """File, old text and new text of each place that an op edits; both empty for whole files."""
    if isinstance(op, Replace):
        yield op.file, op.old, op.new
    elif isinstance(op, Diff):
        for change in parse_diff(op.diff):
            if not change.hunks:
                yield change.path, "", ""
            for hunk in change.hunks:
                yield change.old or change.path, "".join(hunk.old), "".join(hunk.new)
    elif isinstance(op, Graft):
        yield op.file, "", "" if op.whole else _definition(op, tree)
    elif isinstance(op, (Copy, Hook)):
        yield op.to if isinstance(op, Copy) else op.file, "", ""
    elif isinstance(op, Env):
        yield op.reader, op.name, ""


def _definition(op: Graft, tree: Tree) -> str:
    """The head of the first definition that a graft brings, if the file has it."""
    text = _text(tree, op.file) or ""
    try:
        span = top_level(text).get(op.names[0]) if op.names else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        span = None
    return text.split("\n")[span[0]] if span else (op.names[0] if op.names else "")


def _changed(one: str, other: str) -> str:
    """The first line of a text that the other does not have, else its first line."""
    others = {line.strip() for line in other.splitlines()}
    lines = [line.strip() for line in one.splitlines()]
    return next((line for line in lines if line and line not in others), first_line(one))


def _line(text: str, wanted: str) -> int:
    start = text.find(wanted) if wanted else -1
    return text.count("\n", 0, start) + 1 if start >= 0 else 0


def _text(tree: Tree, file: str) -> str | None:
    data = tree.read(file)
    return None if data is None else data.decode("utf-8", "replace")


def _place(tree: Tree, file: str, kind: Kind, anchor: str, line: int) -> Evidence:
    return Evidence(
        file=file,
        found=kind,
        anchor=first_line(anchor)[:_LONG],
        line=line,
        sha256=tree.digest(file) or "",
    )


T = TypeVar("T")


# --------------------------------------------------------------------------- decisions in the cache


#: Entries of each table that a file keeps, the newest: about 10 MB.
_MOST = 4000
#: Files that are kept, one for each version of the code that judges.
_FILES = 4


class Decision(Part, frozen=True, kw_only=True):
    """The state of one layer on one base, and what shows it."""

    layer: Text
    state: State
    reason: str
    since: Annotated[str, Meta(description="the first release with the change")] = ""
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    after: Annotated[str, Meta(description="the layer before it that makes its change")] = ""


class KnownBase(Part, frozen=True, kw_only=True):
    """What the index has as the wheels of a release: their digest, and the versions."""

    digest: Text
    packages: dict[str, str]
    #: project -> digest of what the index says about it
    pages: dict[str, str]


class _Answers(msgspec.Struct):
    bases: dict[str, KnownBase] = msgspec.field(default_factory=dict)
    decisions: dict[str, tuple[Decision, ...]] = msgspec.field(default_factory=dict)
    #: other small answers by the hash of what they depend on: excerpts, diffs
    texts: dict[str, str] = msgspec.field(default_factory=dict)


#: What a decision is made by.
_CODE = (
    "applier/*.py",
    "common/files.py",
    "common/machinecode.py",
    "common/pypi.py",
    "common/wheels.py",
)
_OURS = ("images/bases/pypi.py", "layers/decisions.py")


@cache
def version() -> str:
    """A digest of the code that decides: 12 hexadecimal digits."""
    return code_digest((*_CODE, *_OURS))[:12]


class DecisionStore:
    """The file; what is added is written by :meth:`save`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_dir() / "decisions"
        self._file = self._folder / f"decisions-{version()}.json"
        self._answers = self._read()
        self._added = False

    def _read(self) -> _Answers:
        with suppress(OSError, ValueError, RecursionError):
            return msgspec.json.decode(self._file.read_bytes(), type=_Answers)
        return _Answers()

    def base(self, key: str, index: PackageIndex) -> KnownBase | None:
        """A base, if the index says the same about its packages as then."""
        known = self._answers.bases.get(key)
        if known is None:
            return None
        same = all(index.page_digest(name) == digest for name, digest in known.pages.items())
        return known if same else None

    def add_base(self, key: str, identity: BaseIdentity, index: PackageIndex) -> KnownBase:
        """Keep what a base is."""
        packages = dict(identity.packages)
        pages = {name: index.page_digest(name) for name in packages}
        known = KnownBase(digest=identity.digest, packages=packages, pages=pages)
        self._put(self._answers.bases, key, known)
        return known

    def decisions(self, key: str) -> tuple[Decision, ...] | None:
        """What was decided, by :func:`decision_key`."""
        return self._answers.decisions.get(key)

    def add_decisions(self, key: str, decided: tuple[Decision, ...]) -> None:
        """Keep decisions."""
        self._put(self._answers.decisions, key, decided)

    def text(self, key: str, make: Callable[[], str]) -> str:
        """A small text by the hash of what it depends on, made if it is not kept."""
        if key not in self._answers.texts:
            self._put(self._answers.texts, key, make())
        return self._answers.texts[key]

    def _put(self, table: dict[str, T], key: str, value: T) -> None:
        table.pop(key, None)  # the newest come last
        table[key] = value
        self._added = True

    def save(self) -> None:
        """Write what was added, with what other runs have written meanwhile.

        Raises:
            UsageError: the cache cannot be written.
        """
        if not self._added:
            return
        with locked(str(self._file)):
            theirs = self._read()
            ours = self._answers
            self._answers = _Answers(
                bases=_newest(theirs.bases, ours.bases),
                decisions=_newest(theirs.decisions, ours.decisions),
                texts=_newest(theirs.texts, ours.texts),
            )
            write_atomically(self._file, msgspec.json.encode(self._answers))
            self._drop_old()
        self._added = False

    def _drop_old(self) -> None:
        files = self._folder.glob("decisions-*.json")
        with suppress(OSError):  # another run may drop the same ones
            for path in sorted(files, key=lambda p: -p.stat().st_mtime)[_FILES:]:
                path.unlink(missing_ok=True)


def _newest(theirs: Mapping[str, T], ours: Mapping[str, T]) -> dict[str, T]:
    merged = {**{key: value for key, value in theirs.items() if key not in ours}, **ours}
    return dict(islice(merged.items(), max(0, len(merged) - _MOST), None))


# ----------------------------------------------------------------------------------------- deciding


def base_key(ref: str, platform: Platform, selection: Selection, index: PackageIndex) -> str:
    """A hash of what decides which wheels a reference means, besides the index's pages."""
    tracked = list(tracked_for(selection.layers))
    value = [ref, platform.oci, platform.python, selection.pins(), tracked, index.key]
    return sha256_hex(canonical_json(value))


def decision_key(base: KnownBase, platform: Platform, selection: Selection) -> str:
    """A hash of what decisions about these layers on this base depend on."""
    layers = [layer.digest for layer in selection.layers]
    return sha256_hex(canonical_json([base.digest, platform.oci, platform.python, layers]))


def decide(base: Subject, selection: Selection, sources: Sources) -> tuple[Decision, ...]:
    """Judge each layer on the base as patched by those before it.

    Raises:
        ApplyError: an input is not pinned, cannot be downloaded, or does not match its digest.
    """
    identity = base.identity
    below = OverlayTree(base.tree)
    decided: list[Decision] = []
    before: list[Step] = []
    steps = judge_in_order(
        selection.layers, base.tree, sources, identity.platform.target, identity.env
    )
    for step in steps:
        outcome = step.outcome
        after = _made_by(step, before, base, sources)
        decided.append(
            Decision(
                layer=step.layer.name,
                state=outcome.state,  # type: ignore[arg-type]
                reason=f"layer {after} before it makes this change" if after else outcome.reason,
                since="" if after else outcome.since or "",
                after=after,
                notes=tuple(outcome.notes),
                evidence=evidence_of(step.layer, outcome, below),
            )
        )
        below.update(step.changes)
        before.append(step)
    return tuple(decided)


def _made_by(step: Step, before: Sequence[Step], base: Subject, sources: Sources) -> str:
    """The layer before it that makes a layer's change; empty: the release has it, or lacks it."""
    changing = [one for one in before if one.changes]
    if step.outcome.state not in (APPLIED, UPSTREAM) or not changing:
        return ""
    identity = base.identity

    def has_it(layers: Sequence[Layer]) -> bool:
        judged = judge_in_order(
            [*layers, step.layer], base.tree, sources, identity.platform.target, identity.env
        )
        return list(judged)[-1].outcome.state in (APPLIED, UPSTREAM)

    if has_it([]):
        return ""
    layers = [one.layer for one in before]
    ends = (n for n in range(1, len(layers) + 1) if before[n - 1].changes)
    return next((layers[n - 1].name for n in ends if has_it(layers[:n])), "")
