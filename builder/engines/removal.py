"""Files removed when patch layers are applied to an image: ``finish`` without a container.

``spark_apply.pyz finish`` deletes files inside an image; here the same decision is made from the
image's layers, and the result is whiteouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.finishing import leftovers
from builder.applier.receipts import final_digests, receipts_of
from builder.applier.trees import OverlayTree
from builder.rootfs.tar import FILE

if TYPE_CHECKING:
    from builder.applier.trees import Changes, Distribution, Tree
    from builder.rootfs.view import Rootfs

_CACHE = "__pycache__"


def removed_paths(tree: Tree, view: Rootfs, site: str, changes: Changes) -> list[str]:
    """Paths below ``site`` of the base's files and whole folders to remove."""
    copied = OverlayTree(_Seen(tree, view, site))
    copied.update({path: content for path, content in changes.items() if content is not None})
    final = final_digests(receipts_of(copied))
    folders = _Folders(view, site, changes)
    for path in leftovers(copied, final):
        if copied.digest(path) is not None and not folders.replaced(path):
            folders.remove(path)
    return folders.topmost()


class _Seen:
    """A site-packages directory with all names in it, of any distribution."""

    def __init__(self, tree: Tree, view: Rootfs, site: str) -> None:
        self._tree, self._view, self._site = tree, view, site

    def read(self, path: str) -> bytes | None:
        return self._tree.read(path)

    def digest(self, path: str) -> str | None:
        entry = self._view.stat(f"{self._site}/{path}")
        return entry.row.sha256 if entry is not None and entry.kind == FILE else None

    def mode(self, path: str) -> int:
        return self._tree.mode(path)

    def children(self, directory: str) -> list[str]:
        return self._view.names(f"{self._site}/{directory}".rstrip("/"))

    def distributions(self) -> dict[str, Distribution]:
        return self._tree.distributions()


class _Folders:
    """Names in the folders of site-packages during the removal."""

    def __init__(self, view: Rootfs, site: str, changes: Changes) -> None:
        self._view, self._site = view, site
        self._names: dict[str, set[str]] = {}
        self._new: dict[str, set[str]] = {}
        self._files = {path for path, content in changes.items() if content is not None}
        self._gone: set[str] = set()
        for path in self._files:
            while path:
                folder, _, name = path.rpartition("/")
                self._new.setdefault(folder, set()).add(name)
                path = folder

    def replaced(self, path: str) -> bool:
        """Whether a new file or folder replaces this path or a parent of it."""
        if path in self._new:
            return True
        while path:
            if path in self._files or path in self._gone:
                return True
            path = path.rpartition("/")[0]
        return False

    def names(self, folder: str) -> set[str]:
        """The current names in a folder."""
        if folder not in self._names:
            found = self._view.names(f"{self._site}/{folder}".rstrip("/"))
            self._names[folder] = set(found) | self._new.get(folder, set())
        return self._names[folder]

    def remove(self, path: str) -> None:
        """Remove a file, and parent folders that then have only caches."""
        self._drop(path)
        folder = path.rpartition("/")[0]
        while folder:
            names = self.names(folder)
            if _CACHE in names and not any(name.endswith(".py") for name in names):
                self._drop(f"{folder}/{_CACHE}")
            if names:
                return
            self._drop(folder)
            folder = folder.rpartition("/")[0]

    def _drop(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self.names(folder).discard(name)
        self._gone.add(path)

    def topmost(self) -> list[str]:
        """The removed paths, without those inside a removed folder."""
        return sorted(path for path in self._gone if not self._inside(path))

    def _inside(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        return bool(folder) and (folder in self._gone or self._inside(folder))
