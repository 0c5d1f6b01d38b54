"""Files in an image's site-packages that are in no RECORD and no receipt.

Python runs some of them at startup: ``.pth`` files with code (the ``site`` module executes
lines that begin with ``import``), ``sitecustomize`` and ``usercustomize``.  Those that the
base already had are reported separately.
"""

from __future__ import annotations

import contextlib
import csv
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.environment import ENV_PTH, env_pth
from builder.applier.receipts import env_of, receipt_path, receipts_of
from builder.applier.records import parse_record
from builder.applier.trees import distribution_of
from builder.engines.metadata import SHARE
from builder.errors import UsageError
from builder.rootfs.layers import LayerCache
from builder.rootfs.tar import DIR
from builder.rootfs.view import Rootfs

if TYPE_CHECKING:
    from builder.applier.trees import Tree
    from builder.rootfs.base import OpenedImage
    from builder.rootfs.view import Entry

_CACHE = "__pycache__"
#: a bare name is a link to a package
_CUSTOMIZE = re.compile(
    r"(?:site|user)customize(?:(?:/__init__)?\.(?:[^/]*\.)?(?:py|pyc|so))?", re.ASCII
)
_DPKG = "/var/lib/dpkg/info"
_CODE = re.compile(r"import[ \t]")
#: ``uv venv`` and virtualenv write it beside ``_virtualenv.py``, and record neither.
_OF_VIRTUALENV = {"_virtualenv.pth": "import _virtualenv"}


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """Paths below site-packages; absolute ones are elsewhere."""

    #: run at every start of Python, and added by our layers or later
    hooks: tuple[str, ...] = ()
    #: the same, but from the base, or part of a virtual environment
    of_base: tuple[str, ...] = ()
    #: everything else; a folder without recorded files is listed once, with a ``/``
    files: tuple[str, ...] = ()


def find_unrecorded(opened: OpenedImage, site: str, tree: Tree) -> Unrecorded:
    """Search the image, or only the layers above a locked base.

    ``tree`` is its identified site-packages.
    """
    above = opened.view.above
    own = above if above is not None else _ours(opened.view, site, tree)
    layers = opened.image.layers
    cache = LayerCache(opened.image.source, diff_ids=opened.image.diff_ids)
    with contextlib.closing(Rootfs(layers[len(layers) - (own or 0) :], cache)) as upper:
        view = opened.view if above is None else upper
        found = _InSite(view, site, tree)
        hooks, of_base, files = [], [], []
        for path, entry in view.below(site).items():
            if entry.kind == DIR or _CACHE in path.split("/") or found.explained(path, entry):
                continue
            if not found.is_hook(path):
                files.append(path)
            elif (own is not None and entry.layer >= own) or found.of_virtualenv(path):
                of_base.append(path)
            else:
                hooks.append(path)
        hooks += _elsewhere(upper, site)
    return Unrecorded(
        hooks=_texts(hooks),
        of_base=_texts(of_base),
        files=_texts(sorted({_shortest(path, found.folders) for path in files})),
    )


def _texts(paths: list[str]) -> tuple[str, ...]:
    """File names that can be printed and written as JSON, because names need not be UTF-8."""
    return tuple(
        path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for path in paths
    )


def _ours(view: Rootfs, site: str, tree: Tree) -> int | None:
    """Number of layers from the top to our lowest one; None if there is none."""
    paths = [f"{site}/{receipt_path(r.layer)}" for r in receipts_of(tree)]
    entries = [view.stat(path) for path in (*paths, f"{SHARE}/plan.json")]
    return max((entry.layer + 1 for entry in entries if entry is not None), default=None)


class _InSite:
    """The RECORDs and receipts of one site-packages."""

    def __init__(self, view: Rootfs, site: str, tree: Tree) -> None:
        self._view, self._site = view, site
        self._claims: dict[str, set[str | None]] = {}
        for dist in tree.distributions().values():
            self._claim(dist.info_dir, tree.read(f"{dist.info_dir}/RECORD"))
        for name in view.names(site):
            if distribution_of(name) is not None:
                self._claim(name, view.read(f"{site}/{name}/RECORD"))
        receipts = receipts_of(tree)
        for receipt in receipts:
            self._claims.setdefault(receipt_path(receipt.layer), set()).add(None)
            for path, entry in receipt.files.items():
                if entry.after is not None:
                    self._claims.setdefault(path, set()).add(entry.after)
        self._settings = env_pth(env_of(tree)) if receipts else None
        #: folders with recorded files
        self.folders = {
            "/".join(parts[:depth])
            for parts in (path.split("/") for path in self._claims)
            for depth in range(1, len(parts))
        }

    def _claim(self, info: str, record: bytes | None) -> None:
        with contextlib.suppress(ValueError, csv.Error):  # a damaged one explains nothing
            for row in parse_record(record or b""):
                self._claims.setdefault(row.path, set()).add(row.sha256)
            self._claims.setdefault(f"{info}/RECORD", set()).add(None)

    def explained(self, path: str, entry: Entry) -> bool:
        """Whether a RECORD or a receipt lists it; a hook must also match its sha256."""
        said = self._claims.get(path)
        if path == ENV_PTH:
            return self._view.read(f"{self._site}/{path}") == self._settings
        if said is None or not _may_be_hook(path):
            return said is not None
        real = self._view.stat(f"{self._site}/{path}") or entry
        return None in said or real.row.sha256 in said

    def is_hook(self, path: str) -> bool:
        """Whether Python runs it at startup."""
        if not path.endswith(".pth"):
            return _may_be_hook(path)
        return "/" not in path and _has_code(self._lines(path))

    def of_virtualenv(self, path: str) -> bool:
        """Whether it is the hook of a tool that creates virtual environments."""
        return self._lines(path) == [_OF_VIRTUALENV.get(path)]

    def _lines(self, path: str) -> list[str]:
        return _lines_of(self._view, f"{self._site}/{path}")


def _lines_of(view: Rootfs, path: str) -> list[str]:
    try:
        data = view.read(path) or b""
    except UsageError:  # a form that is not read here may hold anything
        return ["import "]
    return data.decode("utf-8-sig", "replace").splitlines()  # as site.addpackage does


def _has_code(lines: list[str]) -> bool:
    return any(map(_CODE.match, lines))


def _may_be_hook(path: str) -> bool:
    """Whether Python may run a path below a folder of ``sys.path`` at startup."""
    return ("/" not in path and path.endswith(".pth")) or bool(_CUSTOMIZE.fullmatch(path))


def _elsewhere(upper: Rootfs, site: str) -> list[str]:
    """Hooks that layers above the base add to another folder that may be on ``sys.path``."""
    found = []
    for path, entry in upper.below("/").items():
        if entry.kind == DIR or f"/{path}".startswith(f"{site}/"):
            continue
        folder, _, name = f"/{path}".rpartition("/")
        if name == "__init__.py":
            name = f"{folder.rpartition('/')[2]}/{name}"
        settings = name.endswith(".pth") and folder.endswith(("/site-packages", "/dist-packages"))
        code = settings and _has_code(_lines_of(upper, f"/{path}"))
        if code or _CUSTOMIZE.fullmatch(name):
            found.append(f"/{path}")
    packaged = _packaged(upper, {path.rpartition("/")[0] for path in found}) if found else set()
    return [path for path in found if path not in packaged]


def _packaged(upper: Rootfs, folders: set[str]) -> set[str]:
    """Files of packages in these layers: Debian's, and those in some folders."""
    lists = [f"{_DPKG}/{name}" for name in upper.names(_DPKG) if name.endswith(".list")]
    upper.fetch(lists)
    known = {
        line.decode("utf-8", "replace")
        for path in lists
        for line in (upper.read(path) or b"").splitlines()
    }
    for folder in folders:
        for name in upper.names(folder):
            record = upper.read(f"{folder}/{name}/RECORD") if distribution_of(name) else None
            with contextlib.suppress(ValueError, csv.Error):
                known.update(f"{folder}/{row.path}" for row in parse_record(record or b""))
    return known


def _shortest(path: str, recorded: set[str]) -> str:
    """The uppermost folder of a path without recorded files, else the path."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder not in recorded:
            return f"{folder}/"
    return path
