"""Turns an edit of installed files into ops of a layer, and puts them into its ``layer.toml``."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from builder.applier.diff import NOT_PYTHON, lines_of, parse_diff
from builder.applier.edits import definition, graft_text, judge_diff, replace_text, top_level
from builder.applier.states import POST, PRE
from builder.applier.trees import Content, OverlayTree
from builder.applier.values import ApplyError
from builder.common.wheels import WheelTree
from builder.errors import UsageError
from builder.layers.conversion import DraftOp, toml_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.layers.conversion import OpKeys

    #: the releases that have a file, nearest first, with its text
    Donors = Callable[[str], Iterable[tuple[str, str]]]


# --------------------------------------------------------------------------------- an edit as ops


@dataclass(frozen=True, kw_only=True)
class EditedFile:
    """A file before and after an edit; None where it does not exist."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class EditOps:
    """The ops that make an edit, and the files of the layer's folder that they name."""

    ops: tuple[DraftOp, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


#: Changed lines that are no further apart share one anchor.
_APART = 6
#: Lines of context around an anchor or hunk: at least, and at most.
_LEAST, _LEAST_OF_DIFF, _MOST = 1, 3, 40


def ops_of_edit(edits: Iterable[EditedFile], stem: str, donors: Donors, package: str) -> EditOps:
    """The ops for some edited files: a graft where a release has the text, else a replacement where
    one anchor is enough, else a diff.

    Args:
        edits: the files; those without a change give no op.
        stem: the start of the names of diffs and new files in the layer's folder.
        donors: the releases of ``package`` that have a file.
        package: the distribution that the releases are of.

    Raises:
        UsageError: no op makes exactly this edit.
    """
    ops: list[DraftOp] = []
    files: dict[str, bytes] = {}
    for edit in edits:
        if edit.before == edit.after:
            continue
        keys = _graft(edit, donors, package) or _replacement(edit)
        if keys is None:
            name = f"{stem}-{PurePosixPath(edit.path).stem}"
            if edit.before is None:
                name += PurePosixPath(edit.path).suffix
                keys = {"op": "copy", "from": name, "to": edit.path}
                files[name] = (edit.after or "").encode()
            else:
                keys = {"op": "diff", "file": f"{name}.patch"}
                files[f"{name}.patch"] = unified(edit).encode()
        ops.append(DraftOp(keys=keys))
    return EditOps(ops=tuple(ops), files=files)


def _region(before: str, after: str) -> tuple[list[str], list[str], int, int, int] | None:
    """The lines of both texts, and the one region that differs: its first line, and the lines that
    follow it in each; None if it is several."""
    old, new = lines_of(before), lines_of(after)
    blocks = [
        block
        for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if block[0] != "equal"
    ]
    pairs = itertools.pairwise(blocks)
    if not blocks or any(later[1] - earlier[2] > _APART for earlier, later in pairs):
        return None
    return old, new, blocks[0][1], len(old) - blocks[-1][2], len(new) - blocks[-1][4]


def _replacement(edit: EditedFile) -> OpKeys | None:
    """One replacement with the smallest anchor that occurs once, or None."""
    if edit.before is None or edit.after is None:
        return None
    region = _region(edit.before, edit.after)
    if region is None:
        return None
    old, new, start, after_old, after_new = region
    for context in range(_LEAST, _MOST):
        first = max(0, start - context)
        texts = [
            "".join(lines[first : len(lines) - max(0, rest - context)])
            for lines, rest in ((old, after_old), (new, after_new))
        ]
        if not all(texts):
            continue
        if replace_text(edit.before, texts[0], texts[1], 1) == (PRE, edit.after) and (
            replace_text(edit.after, texts[0], texts[1], 1)[0] == POST
        ):
            return {
                "op": "replace", "file": edit.path, "old": texts[0], "new": texts[1], "count": 1,
            }  # fmt: skip
    return None


def unified(edit: EditedFile, *, blobs: bool = False) -> str:
    """The edit as a diff with the least context that has one place.

    Args:
        edit: a file that differs.
        blobs: also git's names of both contents, from which ``git apply --3way`` merges.

    Raises:
        UsageError: there is no such diff.
    """
    for context in range(_LEAST_OF_DIFF, _MOST):
        text = _diff(edit, context, _blobs(edit) if blobs else "")
        tree = OverlayTree(WheelTree([]))
        if edit.before is not None:
            tree.update({edit.path: Content.of(edit.before.encode())})
        result = judge_diff(parse_diff(text), tree)
        tree.update(result.changes)
        data = tree.read(edit.path)
        if result.form == PRE and (None if data is None else data.decode()) == edit.after:
            return text
    raise UsageError(
        f"{edit.path}: no diff makes this edit and has one place",
        hint="make the edit smaller, or write the op by hand (docs/layers.md)",
    )


def _blobs(edit: EditedFile) -> str:
    names = ["0" * 40 if text is None else _blob(text) for text in (edit.before, edit.after)]
    mode = " 100644" if edit.before is not None and edit.after is not None else ""
    return f"index {names[0]}..{names[1]}{mode}\n"


def _blob(text: str) -> str:
    data = text.encode()
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()


def _diff(edit: EditedFile, context: int, index: str = "") -> str:
    """A unified diff as git writes it, also of files without a line feed at the end."""
    before, after = lines_of(edit.before or ""), lines_of(edit.after or "")
    lines = [f"diff --git a/{edit.path} b/{edit.path}\n"]
    lines += ["new file mode 100644\n"] if edit.before is None else []
    lines += ["deleted file mode 100644\n"] if edit.after is None else []
    lines += [index] if index else []
    names = (
        f"a/{edit.path}" if edit.before is not None else "/dev/null",
        f"b/{edit.path}" if edit.after is not None else "/dev/null",
    )
    lines += difflib.unified_diff(before, after, *names, n=context)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


# ---------------------------------------------------------------------------------------- a graft


def _graft(edit: EditedFile, donors: Donors, package: str) -> OpKeys | None:
    """A graft out of the nearest release that has exactly the edited definitions, or None."""
    if edit.after is None or not edit.path.endswith(".py"):
        return None
    wanted: OpKeys = {"op": "graft", "file": edit.path}
    if edit.before is None:
        same = (version for version, text in donors(edit.path) if text == edit.after)
        version = next(same, None)
        return {**wanted, "from": f"{package}=={version}", "whole": True} if version else None
    try:
        names, after, is_new = changed_definitions(edit.before, edit.after)
    except NOT_PYTHON:
        return None
    for version, text in donors(edit.path) if names else ():
        try:
            form, grafted = graft_text(edit.before, text, names, after or None, not is_new)
        except (ApplyError, *NOT_PYTHON):
            continue
        if form == PRE and _dense(grafted) == _dense(edit.after):
            place = {"after": after} if is_new and after else {}
            how = {} if is_new else {"replace": True}
            return {**wanted, "from": f"{package}=={version}", "names": names, **place, **how}
    return None


def _dense(text: str) -> list[str]:
    """The lines of a text without empty ones: a graft puts its own around a definition."""
    return [line for line in text.splitlines() if line.strip()]


def changed_definitions(before: str, after: str) -> tuple[list[str], str, bool]:
    """The top-level definitions that an edit changes: their names, the one before the first, and
    whether all are new; no names if one is removed, or some are new and some are not.

    Raises:
        SyntaxError: a text is not Python.
    """
    was, now = top_level(before), top_level(after)
    names = [name for name in now if definition(before, name) != definition(after, name)]
    new = [name for name in names if name not in was]
    if not names or not set(was) <= set(now) or len(new) not in (0, len(names)):
        return [], "", False
    order = sorted(now, key=lambda name: now[name])
    place = order.index(names[0])
    return names, order[place - 1] if place else "", bool(new)


# ---------------------------------------------------------------------------------------- versions


def bound(version: str) -> str:
    """The least version that counts as a release's: its first pre-release.

    >>> bound("0.34.0"), bound("0.6.11.post1")
    ('0.34.0rc0', '0.6.11.post1.dev0')
    """
    parsed = Version(version)
    return f"{version}.dev0" if parsed.is_postrelease else f"{parsed.base_version}rc0"


def after_newest(version: str) -> str:
    """The bound above the newest release that was read: that of the next minor release."""
    release = [*Version(version).release, 0, 0]
    return bound(f"{release[0]}.{release[1] + 1}.0")


def run_around(versions: Sequence[str], fits: Mapping[str, bool], version: str) -> list[str]:
    """The unbroken run of releases that fit, around one of them, oldest first."""
    at = versions.index(version)
    low = high = at
    while low > 0 and fits.get(versions[low - 1]):
        low -= 1
    while high + 1 < len(versions) and fits.get(versions[high + 1]):
        high += 1
    return list(versions[low : high + 1])


def range_of(run: Sequence[str], versions: Sequence[str]) -> tuple[str, str]:
    """The bounds of a run of releases, up to the next release or, if there is none, minor.

    A release begins with its first candidate, unless a candidate beside the run is not in it.
    """
    start, end = versions.index(run[0]), versions.index(run[-1]) + 1
    low = bound(run[0])
    if start and Version(versions[start - 1]) >= Version(low):
        low = run[0]
    if end == len(versions):
        return low, after_newest(run[-1])
    following = Version(versions[end])
    if Version(bound(versions[end])) > Version(run[-1]):
        return low, bound(versions[end])
    return low, versions[end] if following.is_prerelease else _after(run[-1])


def _after(version: str) -> str:
    """The least version above one: of the next candidate or post-release, or its first.

    >>> _after("0.34.0rc2"), _after("0.6.11.post1"), _after("0.34.0")
    ('0.34.0rc3', '0.6.11.post2.dev0', '0.34.0.post0.dev0')
    """
    parsed = Version(version)
    if parsed.post is not None:
        return f"{parsed.base_version}.post{parsed.post + 1}.dev0"
    if parsed.pre is not None:
        return f"{parsed.base_version}{parsed.pre[0]}{parsed.pre[1] + 1}"
    return f"{parsed.base_version}.post0.dev0"


def _ends_of(spec: Specifier) -> tuple[str, str]:
    """The bounds of one specifier: "0" and "" where it has none."""
    version, operator = spec.version, spec.operator
    if operator == "!=":
        return "0", ""
    if operator == "==" and version.endswith(".*"):
        start = version.removesuffix(".*")
        return f"{start}rc0", _next(Version(start).release)
    if operator == "~=":
        return version, _next(Version(version).release[:-1])
    low = {">=": version, ">": _after(version), "==": version, "===": version}
    high = {"<": version, "<=": _after(version), "==": _after(version), "===": _after(version)}
    return low.get(operator, "0"), high.get(operator, "")


def _next(release: Sequence[int]) -> str:
    """The first candidate above all releases that begin with these numbers."""
    return ".".join(map(str, [*release[:-1], release[-1] + 1])) + "rc0"


def ends(specifier: str) -> tuple[str, str]:
    """The bounds of a range: "0" and "" where it has none."""
    lows, highs = zip(("0", ""), *map(_ends_of, SpecifierSet(specifier)), strict=True)
    return max(lows, key=Version), min(filter(None, highs), key=Version, default="")


def without(specifier: str, low: str, high: str) -> list[str]:
    """The parts of a range that are not in ``[low, high)``: none, one below, one above, or both."""
    first, last = ends(specifier)
    if Version(first) >= Version(high) or (last and Version(last) <= Version(low)):
        return [specifier]
    parts = []
    if Version(first) < Version(low):
        parts.append(_limited(specifier, "<", low))
    if not last or Version(high) < Version(last):
        parts.append(_limited(specifier, ">=", high))
    return parts


def up_to(specifier: str, high: str) -> str:
    """A range that ends with ``<``, with another end; empty if it does not.

    >>> up_to(">=0.40.0rc0,<0.42.0rc0", "0.43.0rc0"), up_to("==0.40.0", "0.43.0rc0")
    ('>=0.40.0rc0,<0.43.0rc0', '')
    """
    operators = {spec.operator for spec in SpecifierSet(specifier)}
    fits = "<" in operators and operators <= {"<", ">=", "!="}
    return _limited(specifier, "<", high) if fits else ""


def _limited(specifier: str, operator: str, version: str) -> str:
    """A range with another bound in place of its own of that operator."""
    specs = [spec.strip() for spec in specifier.split(",") if spec.strip()]
    others = [spec for spec in specs if Specifier(spec).operator != operator]
    place = 0 if operator == ">=" else len(others)
    return ",".join([*others[:place], f"{operator}{version}", *others[place:]])


# ------------------------------------------------------------------------------ layer.toml as text
#
# Comments and the order of tables are the author's, so the file is edited, not written again.


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of ``layer.toml``: the lines from its header, with the comments above it."""

    header: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.lines)

    def setting(self, key: str, line: str) -> Section:
        """The section with another line for a key, which has one line now.

        Raises:
            UsageError: the section has no line for the key.
        """
        at = [n for n, text in enumerate(self.lines) if re.match(rf"{key}\s*=", text)]
        if len(at) != 1:
            raise UsageError(f"layer.toml: [{self.header}] has no line {key} = ... to change")
        lines = [*self.lines]
        lines[at[0]] = line
        return replace(self, lines=tuple(lines))


_HEADER = re.compile(r"\[\[?\s*([\w.-]+)\s*\]\]?")


def sections(text: str) -> list[Section]:
    """The tables of a ``layer.toml`` in order; the first, without a header, is that of the file."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    inside = ""
    for line in lines_of(text):
        match = None if inside else _HEADER.match(line)
        if match:
            above: list[str] = []
            while parts[-1][1] and parts[-1][1][-1].startswith("#"):
                above.insert(0, parts[-1][1].pop())
            parts.append((match[1], above))
        parts[-1][1].append(line)
        inside = _quoted(line, inside)
    return [Section(header=header, lines=tuple(lines)) for header, lines in parts]


def _quoted(line: str, inside: str) -> str:
    """The quotes that are open after a line: three of one kind, or none."""
    for mark in re.findall(r"'''|\"\"\"", line):
        if not inside:
            inside = mark
        elif mark == inside:
            inside = ""
    return inside


def op_text(op: DraftOp) -> str:
    """One ``[[variant.op]]`` table; texts of several lines as such, where TOML can say them."""
    lines = [*(f"# {comment}\n" for comment in op.comments), "[[variant.op]]\n"]
    for key, value in op.keys.items():
        many = isinstance(value, str) and key in ("old", "new") and "\n" in value
        lines.append(f"{key} = {_literal(str(value)) if many else _value(value)}\n")
    return "".join(lines)


def _value(value: str | int | Sequence[str] | Mapping[str, str]) -> str:
    return str(value).lower() if isinstance(value, bool) else toml_value(value)


def _literal(text: str) -> str:
    if "'''" in text or text.endswith("'") or re.search(r"[^\n\t -~\u00a0-\uffff]", text):
        return toml_value(text)
    return f"'''\n{text}'''"


def variants_in(parts: Sequence[Section]) -> Iterator[tuple[int, list[int]]]:
    """The places of each variant's table, and of its ops' tables."""
    for at, part in enumerate(parts):
        if part.header != "variant":
            continue
        ops = []
        for place in range(at + 1, len(parts)):
            if not parts[place].header.startswith("variant."):
                break
            ops.append(place)
        yield at, ops


def when_line(package: str, specifier: str, others: Mapping[str, str]) -> str:
    """The line of a table with its range."""
    ranges = {**others, package: specifier}
    pairs = ", ".join(f"{toml_value(name)} = {toml_value(spec)}" for name, spec in ranges.items())
    return f"when = {{ {pairs} }}\n"
