"""Edits of a text other than diffs: exact replacement, grafts and hooks."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE
from builder.applier.text import first_line, lines_of, nearest_line, nearest_place

if TYPE_CHECKING:
    from collections.abc import Sequence


def _standalone(text: str, wanted: str, inside: str) -> int:
    """Occurrences of ``wanted`` that are not part of an occurrence of the longer ``inside``."""
    if wanted in inside and wanted != inside:
        text = text.replace(inside, "\0")
    return text.count(wanted)


def replace_text(text: str, old: str, new: str, count: int) -> tuple[str, str]:
    """Judge an exact replacement: ``(pre|post|drift|ambiguous, new text or reason)``.

    If both texts match, the longer one decides: an insertion's new text contains its old one.
    """
    pre, post = _standalone(text, old, new), _standalone(text, new, old)
    if pre and post and old in new:  # replacing would insert into the patched place again
        return AMBIGUOUS, f"{pre} places are unpatched and {post} are patched, expected {count}"
    if pre == count:
        return PRE, text.replace(old, new)
    if pre > count:
        return AMBIGUOUS, f"{first_line(old)!r} occurs {pre} times, expected {count}"
    if pre == 0 and post == count:
        return POST, text
    if post > count:
        return AMBIGUOUS, f"{first_line(new)!r} occurs {post} times, expected {count}"
    if pre or post:
        return DRIFT, f"{pre} of {count} places are unpatched and {post} are patched"
    place = nearest_place(text, old)
    if place:
        return DRIFT, place
    near = nearest_line(text, first_line(old))
    return DRIFT, f"{first_line(old)!r} not found" + (f"; nearest is line {near}" if near else "")


def top_level(source: str) -> dict[str, tuple[int, int]]:
    """Line spans (0-based start, end) of the top-level definitions of a module, by name."""
    spans: dict[str, tuple[int, int]] = {}
    for node in ast.parse(source).body:
        names: list[str] = []
        start = node.lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        for name in names:
            spans[name] = (start - 1, node.end_lineno or node.lineno)
    return spans


def definition(source: str, name: str) -> str | None:
    """The source text of a top-level definition, or None."""
    span = top_level(source).get(name)
    return None if span is None else "".join(lines_of(source)[slice(*span)])


def graft_text(
    target: str, donor: str, names: Sequence[str], after: str | None, replace: bool
) -> tuple[str, str]:
    """Judge a graft of named definitions: ``(found, new text or reason)``.

    Raises:
        ApplyError: the donor lacks a name, so its pin is wrong.
    """
    verdicts = set()
    text = target
    for name in names:
        wanted = definition(donor, name)
        if wanted is None:
            raise ApplyError(f"the donor module does not define {name}", EXIT_USAGE)
        wanted = wanted.rstrip("\n") + "\n"
        spans = top_level(text)
        lines = lines_of(text)
        if name in spans:
            start, end = spans[name]
            present = "".join(lines[start:end]).rstrip("\n") + "\n"
            if present == wanted:
                verdicts.add(POST)
                continue
            if not replace:
                return DRIFT, f"{name} is already defined (line {start + 1}) and differs"
            lines[start:end] = [wanted]
        elif replace:
            return DRIFT, f"{name} is not defined, so it cannot be replaced"
        else:
            if after is not None and after not in spans:
                return DRIFT, f"{name} belongs after {after}, which is not defined"
            at = spans[after][1] if after else len(lines)
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            tail = ["\n", "\n"] if after and at < len(lines) and lines[at].strip() else []
            lines[at:at] = ["\n", "\n", wanted, *tail]
            after = name
        verdicts.add(PRE)
        text = "".join(lines)
    if not verdicts:
        raise ApplyError("the graft names no definition", EXIT_USAGE)
    if len(verdicts) > 1:
        return DRIFT, "some of the definitions already exist and some do not"
    return verdicts.pop(), text


def run_hook(source: str, function: str, text: str) -> tuple[str, str]:
    """Judge a hook, a pure ``str -> str``: ``(found, new text or reason)``."""
    namespace: dict[str, Any] = {}
    try:
        exec(compile(source, "<hook>", "exec"), namespace)
        edited = namespace[function](text)
        if not isinstance(edited, str):
            return DRIFT, f"hook {function} returned {type(edited).__name__}, not str"
        if edited == text:
            return POST, text
        if namespace[function](edited) != edited:
            return DRIFT, f"hook {function} is not idempotent: a second run changes the file again"
    except Exception as error:
        return DRIFT, f"hook {function} failed: {type(error).__name__}: {error}"
    return PRE, edited
