"""Edits and diffs on the files of a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.diff import FileDiff, parse_diff
from builder.applier.hunks import apply_hunks, judge_hunks
from builder.applier.outcomes import OpResult
from builder.applier.states import DRIFT, POST, PRE
from builder.applier.text import NOT_PYTHON
from builder.applier.trees import Content, OverlayTree, Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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
        found, new = edit(text)
    except NOT_PYTHON as error:
        return OpResult(DRIFT, reason=f"{path} is not Python: {str(error) or type(error).__name__}")
    if found == POST:
        return OpResult(POST)
    if found != PRE:
        return OpResult(found, reason=f"{path}: {new}")
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
    found: dict[str, list[str]] = {}
    notes: list[str] = []
    for change in files:
        result = judge_file(change, tree)
        if result.found not in (PRE, POST):
            return result
        found.setdefault(result.found, []).append(change.path)
        whole.changes.update(result.changes)
        if result.reason:
            notes.append(result.reason)
    whole.found, whole.reason = next(iter(found)), "; ".join(notes)
    if len(found) > 1:
        there, missing = ", ".join(found[POST]), ", ".join(found[PRE])
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
    if result.found == PRE:
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
        if change.hunks and result.found == PRE:
            return OpResult(DRIFT, reason=f"{new} already exists, without the edits")
        return result if change.hunks else OpResult(POST)
    if result.found == POST:
        return OpResult(DRIFT, reason=f"{old} already has the edits, but is not renamed to {new}")
    if result.found == PRE:
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
        if change.new is None and judge_deletion(change, tree).found == PRE:
            return True
        verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), change.hunks)
        if any(verdict.found == PRE for verdict in verdicts):
            return True
    return False


def undone(tree: Tree, diffs: Sequence[str]) -> OverlayTree:
    """The tree with a stack's applied diffs reversed, last one first."""
    overlay = OverlayTree(tree)
    for diff in reversed(diffs):
        edits = (c for c in parse_diff(diff) if c.hunks or c.old != c.new)
        result = judge_diff([change.reversed() for change in edits], overlay)
        if result.found == PRE:
            overlay.update(result.changes)
    return overlay
