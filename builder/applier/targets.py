"""Paths that a layer names or writes: one rule for every op.  Imports no sibling but failures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_USAGE, ApplyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.applier.trees import OverlayTree

#: C0, DEL and C1 control characters, and half characters, which no file name in UTF-8 has.
_UNUSABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: Linux's limits, in bytes: of a name, and of a path, with room for the folder above.
_NAME, _PATH = 255, 3000


def path_problem(path: str) -> str:
    """Why a text is not the path of a file below site-packages, or ``""``.

    It has names separated by one ``/`` each, and no other form of the same path.
    """
    if _UNUSABLE.search(path):
        return "has a character that no file name should have"
    names = path.split("/")
    if "\\" in path:
        return "has a backslash"
    if "" in names:
        return "has an empty name: it is empty, absolute, or has two slashes or one at its end"
    if "." in names or ".." in names:
        return "has a name '.' or '..'"
    if len(path.encode()) > _PATH or any(len(name.encode()) > _NAME for name in names):
        return "is too long"
    return ""


def checked_path(path: str, where: str) -> str:
    """The path, if it can be one of a file below site-packages.

    Raises:
        ApplyError: it cannot.
    """
    problem = path_problem(path)
    if problem:
        shown = repr(path if len(path) < 100 else f"{path[:100]}...")
        raise ApplyError(f"{where}: the path {shown} {problem}", EXIT_USAGE)
    return path


def collision(paths: Iterable[str], tree: OverlayTree) -> str:
    """Why a tree cannot have files at all these paths: one is a folder, or below a file.

    ``tree`` already has the files.
    """
    folders: dict[str, None] = {}
    for path in paths:
        if tree.children(path):
            return f"{path} is a folder, and a file in its place would hide all its files"
        above = path
        while (above := above.rpartition("/")[0]) and above not in folders:
            folders[above] = None
    for folder in folders:
        if tree.digest(folder) is not None:
            below = next(path for path in paths if path.startswith(f"{folder}/"))
            return f"{folder} is a file, and so {below} cannot be below it"
    return ""
