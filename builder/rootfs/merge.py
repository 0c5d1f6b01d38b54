"""Merges one folder of several layers, as overlayfs shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.rootfs.index import IMPLICIT, OPAQUE, WHITEOUT, LayerIndex, Row, parent_of
from builder.rootfs.tar import DIR, FILE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.rootfs.facts import RecordedFiles


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as a container sees it, and the layer (0 is the top) with its bytes.

    The layer is -1 for recorded facts.
    """

    row: Row
    layer: int

    @property
    def kind(self) -> str:
        """``file``, ``dir``, ``symlink`` or ``other``."""
        return self.row.kind

    @property
    def executable(self) -> bool:
        """Whether it is an executable file."""
        return self.kind == FILE and bool(self.row.mode & 0o111)


def merged_below(
    start: str, layers: Iterable[tuple[int, LayerIndex | RecordedFiles]]
) -> dict[str, Entry]:
    """Everything below a folder, by path; layers are given with their numbers, top first."""
    merged: dict[str, Entry] = {}
    hidden: set[tuple[str, str]] = set()
    for number, layer in layers:
        blocked = _Blocked(start, merged, hidden)
        shown: dict[str, Entry] = {}
        cut: set[tuple[str, str]] = set(layer.hidden_below(start))
        for row in layer.below(start):
            if not blocked(row.path):
                shown[row.path] = Entry(row, number)
            elif row.kind not in (DIR, IMPLICIT):  # it took a folder's place, and was replaced
                cut.add((row.path, OPAQUE))
        merged.update(shown)
        hidden.update(cut)
        if layer.seals(start):
            break
    return merged


class _Blocked:
    """Whether an entry of a layer is covered by the layers above it, below one directory."""

    def __init__(self, start: str, merged: dict[str, Entry], hidden: set[tuple[str, str]]) -> None:
        self._merged, self._hidden = merged, hidden
        self._folders = {start: False}

    def __call__(self, path: str) -> bool:
        known = self._merged.get(path)
        if known is not None and known.kind != IMPLICIT:
            return True
        return (path, WHITEOUT) in self._hidden or self._inside(parent_of(path))

    def _inside(self, folder: str) -> bool:
        if folder not in self._folders:
            known = self._merged.get(folder)
            self._folders[folder] = (
                (folder, WHITEOUT) in self._hidden
                or (folder, OPAQUE) in self._hidden
                or (known is not None and known.kind not in (DIR, IMPLICIT))
                or self._inside(parent_of(folder))
            )
        return self._folders[folder]
