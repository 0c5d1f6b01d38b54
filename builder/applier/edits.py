"""Edits of files: exact replacement, grafts, hooks, diffs, and environment variables."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.applier.diff import (
    NOT_PYTHON,
    FileDiff,
    apply_hunks,
    first_line,
    judge_hunks,
    lines_of,
    nearest_line,
    nearest_place,
    parse_diff,
)
from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE, OpResult
from builder.applier.trees import Content, OverlayTree, Tree
from builder.applier.values import EXIT_USAGE, ApplyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


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


# ---------------------------------------------------------------------------- environment variables


ENV_PTH = "spark_build_env.pth"


@dataclass(frozen=True)
class EnvReader:
    """The variables that a module reads: name -> accepted values, or None for any value."""

    known: Mapping[str, tuple[str, ...] | None]


def read_envs(source: str) -> EnvReader:
    """Read vLLM's ``envs.py``: keys of ``environment_variables``, and the choices of each."""
    known: dict[str, tuple[str, ...] | None] = {}
    lines = lines_of(source)
    for node in ast.parse(source).body:
        target: ast.expr | None = None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        is_table = isinstance(target, ast.Name) and target.id == "environment_variables"
        if not is_table or not isinstance(node.value, ast.Dict):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                text = lines[value.lineno - 1 : value.end_lineno]
                listed = any("_with_choices" in line for line in text)
                known[key.value] = _choices(value) if listed else None
    return EnvReader(known)


def _choices(value: ast.expr) -> tuple[str, ...] | None:
    for call in ast.walk(value):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name not in ("env_with_choices", "env_set_with_choices", "env_list_with_choices"):
            continue
        for argument in call.args:
            if isinstance(argument, (ast.List, ast.Tuple)):
                items = [e.value for e in argument.elts if isinstance(e, ast.Constant)]
                return tuple(str(item) for item in items)
    return None


def env_pth(env: Mapping[str, str]) -> bytes:
    """A ``.pth`` line that sets defaults in every Python process of this environment.

    A mod cannot export a variable into a server that starts later, and a virtual environment has
    no image ENV; this works for both.  A variable that is already set takes precedence.
    """
    pairs = repr(dict(sorted(env.items())))
    return f"import os; [os.environ.setdefault(k, v) for k, v in {pairs}.items()]\n".encode()


# ---------------------------------------------------------------------------------- files of a tree


def edit_file(tree: Tree, path: str, edit: Callable[[str], tuple[str, str]]) -> OpResult:
    """Judge an edit of a text file: the finding, and the resulting file."""
    data = tree.read(path)
    if data is None:
        return OpResult(DRIFT, reason=f"{path} does not exist")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return OpResult(DRIFT, reason=f"{path} is not UTF-8 text")
    try:
        finding, new = edit(text)
    except NOT_PYTHON as error:
        return OpResult(DRIFT, reason=f"{path} is not Python: {str(error) or type(error).__name__}")
    if finding == POST:
        return OpResult(POST)
    if finding != PRE:
        return OpResult(finding, reason=f"{path}: {new}")
    if new == text:
        return OpResult(DRIFT, reason=f"{path}: the edit changes nothing")
    content = Content.of(new.encode("utf-8"), tree.mode(path))
    return OpResult(PRE, changes={path: content})


def create_file(tree: Tree, path: str, data: bytes, mode: int = 0o644) -> OpResult:
    """Judge a new file."""
    present = tree.read(path)
    if present == data:
        return OpResult(POST)
    if present is not None:
        return OpResult(DRIFT, reason=f"{path} already exists with different content")
    return OpResult(PRE, changes={path: Content.of(data, mode)})


def judge_diff(files: Iterable[FileDiff], tree: Tree) -> OpResult:
    """Judge a diff on a tree, with all its files together."""
    whole = OpResult(POST)
    by_finding: dict[str, list[str]] = {}
    notes: list[str] = []
    for change in files:
        result = judge_file(change, tree)
        if result.form not in (PRE, POST):
            return result
        by_finding.setdefault(result.form, []).append(change.path)
        whole.changes.update(result.changes)
        if result.reason:
            notes.append(result.reason)
    whole.form, whole.reason = next(iter(by_finding)), "; ".join(notes)
    if len(by_finding) > 1:
        there, missing = ", ".join(by_finding[POST]), ", ".join(by_finding[PRE])
        return OpResult(DRIFT, reason=f"{there} already patched, {missing} not")
    return whole


def judge_file(change: FileDiff, tree: Tree) -> OpResult:
    """Judge a diff of one file; ``reason`` has offsets if it applies."""
    if change.old is None:
        text = "".join(line for hunk in change.hunks for line in hunk.new)
        return create_file(tree, change.path, text.encode("utf-8"), change.mode or 0o644)
    if change.new is None:
        return judge_deletion(change, tree)
    if change.new != change.old:
        return _judge_rename(change, tree)
    if not change.hunks:
        return _judge_mode(change, tree)
    return _judge_hunks_of(change, tree, change.new)


def _judge_hunks_of(change: FileDiff, tree: Tree, path: str) -> OpResult:
    notes: list[str] = []

    def edit(text: str) -> tuple[str, str]:
        verdict, new, offsets = apply_hunks(text, change.hunks)
        notes.extend(f"{path}: {offset}" for offset in offsets)
        return verdict, new

    result = edit_file(tree, path, edit)
    content = result.changes.get(path)
    if content is not None and content.data is not None and change.mode is not None:
        result.changes[path] = Content.of(content.data, change.mode)
    if result.form == PRE:
        result.reason = "; ".join(notes)
    return result


def judge_deletion(change: FileDiff, tree: Tree) -> OpResult:
    data = tree.read(change.path)
    if data is None:
        return OpResult(POST)
    text = "".join(line for hunk in change.hunks for line in hunk.old)
    if data != text.encode("utf-8"):
        return OpResult(DRIFT, reason=f"{change.path} differs from the file that the diff deletes")
    return OpResult(PRE, changes={change.path: None})


def _judge_rename(change: FileDiff, tree: Tree) -> OpResult:
    old, new = change.old or "", change.new or ""
    before, after = tree.read(old), tree.read(new)
    if (before is None) == (after is None):
        both = "both exist" if before is not None else "neither exists"
        return OpResult(DRIFT, reason=f"{old} should become {new}, but {both}")
    path = new if before is None else old
    result = _judge_hunks_of(change, tree, path) if change.hunks else OpResult(PRE)
    if before is None:
        if change.hunks and result.form == PRE:
            return OpResult(DRIFT, reason=f"{new} already exists, without the edits")
        return result if change.hunks else OpResult(POST)
    if result.form == POST:
        return OpResult(DRIFT, reason=f"{old} already has the edits, but is not renamed to {new}")
    if result.form == PRE:
        data = before if not change.hunks else (result.changes[old] or Content.of(b"")).read()
        result.changes = {old: None, new: Content.of(data, change.mode or tree.mode(old))}
    return result


def _judge_mode(change: FileDiff, tree: Tree) -> OpResult:
    path, mode = change.path, change.mode or 0o644
    data = tree.read(path)
    if data is None:
        return OpResult(DRIFT, reason=f"{path} does not exist")
    if bool(tree.mode(path) & 0o111) == bool(mode & 0o111):
        return OpResult(POST)
    return OpResult(PRE, changes={path: Content.of(data, mode)})


def unpatched(files: Iterable[FileDiff], tree: Tree) -> bool:
    """Whether any hunk of a diff still finds its old text.

    A missing new file proves nothing: it may have been moved.
    """
    for change in files:
        data = tree.read(change.old) if change.old is not None else None
        if data is None:
            continue
        if change.new is None and judge_deletion(change, tree).form == PRE:
            return True
        verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), change.hunks)
        if any(verdict.form == PRE for verdict in verdicts):
            return True
    return False


def undone(tree: Tree, diffs: Sequence[str]) -> OverlayTree:
    """The tree with a stack's applied diffs reversed, last one first."""
    overlay = OverlayTree(tree)
    for diff in reversed(diffs):
        edits = (c for c in parse_diff(diff) if c.hunks or c.old != c.new)
        result = judge_diff([change.reversed() for change in edits], overlay)
        if result.form == PRE:
            overlay.update(result.changes)
    return overlay
