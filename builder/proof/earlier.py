"""What Python finds earlier on ``sys.path`` than the recorded files, for each start of an image."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from builder.images.rootfs.tar import DIR, SYMLINK
from builder.proof.searchpath import NotFollowed, search_path
from builder.proof.starts import build_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from builder.images.rootfs.view import Entry, Interpreter
    from builder.proof.searchpath import Disk, SearchPath, Start

#: Modules that ``site`` imports if there are any.
_CUSTOMIZE = frozenset({"sitecustomize", "usercustomize"})


@dataclass(frozen=True)
class Earlier:
    """A file that Python runs instead of another, or a setting that leads it elsewhere."""

    path: str
    #: what it hides; ``""`` if it is run, or leads Python elsewhere
    hides: str = ""
    #: whether the base has it, and no variable leads there
    of_base: bool = False


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Where the recorded files are, and which of them layers changed."""

    python: Interpreter
    site: str
    #: packages that layers change, by top-level name
    changed: Collection[str]
    #: top-level modules in RECORDs
    recorded: Collection[str]


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Compares search paths with what is expected."""

    disk: Disk
    expected: Expected
    #: whether an entry comes from the layers above the base
    is_above: Callable[[Entry], bool]
    #: the files that could be a module in a folder, in Python's order
    candidates: Callable[[str, str], Sequence[str]]
    #: the module name of a file name, or ``""``
    stem: Callable[[str], str]

    def judge(self, starts: Sequence[Start]) -> Iterator[Earlier]:
        """Everything that any of the starts finds too early."""
        for start in starts:
            build = build_of(self.disk, start, self.expected.python)
            try:
                path = search_path(self.disk, start, build)
            except NotFollowed as error:
                yield Earlier(f"{start.name} (Python cannot start: {error})")
                continue
            yield from self._judge_one(start, path)

    def _judge_one(self, start: Start, path: SearchPath) -> Iterator[Earlier]:
        places = [self.disk.realpath(folder) for folder in path.folders]
        site = self.expected.site
        if path.not_installed:
            yield Earlier(path.not_installed)
            return  # where it then looks depends on where it was built
        if site not in places:
            if start.script or start.name == self.expected.python.command:
                yield Earlier(f"{start.name} (it does not search {site})")
            return
        end = places.index(site)
        library = self._libraries[1] if len(self._libraries) > 1 else ""
        found = places.index(library) if library in places else len(places)
        if self.disk.realpath(path.stdlib) != library or found == len(places):
            yield Earlier(f"{path.stdlib or start.name} (instead of {library})")
        named = {*path.named, *([] if start.script else [path.first])}
        for number, folder in enumerate(path.folders[: max(end, found)]):
            place = places[number] or ""
            wanted = self._wanted(place, before_library=number < found, before_site=number < end)
            by_setting = folder in named and place != site
            yield from self._in_folder(folder, wanted, by_setting=by_setting)
        for folder in path.named:
            yield from self._in_folder(folder, _CUSTOMIZE, by_setting=True)

    @cached_property
    def _libraries(self) -> list[str]:
        """The folders of the standard library; the first is an archive."""
        folders = self.expected.python.stdlib
        return [self.disk.realpath(folder) or folder for folder in folders]

    @cached_property
    def _of_library(self) -> frozenset[str]:
        """The modules of the standard library: the image's, and those that this Python knows."""
        listed = [name for folder in self._libraries[1:] for name in self.disk.names(folder)]
        stems = {self.stem(name) or name for name in listed}
        known = {*sys.stdlib_module_names, *filter(str.isidentifier, stems)}
        return frozenset(known - _CUSTOMIZE - {"__pycache__"})

    def _wanted(self, place: str, *, before_library: bool, before_site: bool) -> frozenset[str]:
        """The modules that a folder must not have, as it is in front of those that should."""
        own = (*self.expected.changed, *self.expected.recorded) if before_site else ()
        if place in self._libraries:
            return frozenset(self.expected.changed)
        return self._of_library.union(own) if before_library else frozenset(own)

    def _in_folder(
        self, folder: str, wanted: frozenset[str], *, by_setting: bool
    ) -> Iterator[Earlier]:
        entry, place = self.disk.stat(folder), self.disk.realpath(folder)
        if entry is None or place is None:
            return
        if entry.kind != DIR:
            if wanted is not _CUSTOMIZE:
                yield Earlier(folder, f"{self.expected.site}/")
            return
        names = self.disk.names(place)
        for stem in sorted({self.stem(name) or name for name in names} & wanted):
            first = next(iter(self.candidates(place.rstrip("/"), stem)), "/")
            if first.endswith("/"):
                continue  # a namespace, which a module in any later folder precedes
            file = f"/{first.lstrip('/')}"
            is_ours = stem in self.expected.changed
            matters = is_ours or stem in self._of_library or stem in _CUSTOMIZE
            shown = f"{folder.rstrip('/')}/{file.removeprefix(place).lstrip('/')}"
            bad = is_ours or (by_setting and matters) or self._is_above(shown)
            yield Earlier(file, "" if stem in _CUSTOMIZE else stem, of_base=not bad)

    def _is_above(self, path: str) -> bool:
        """Whether a file is from the layers above the base, or is reached by a link of theirs."""
        real = self.disk.stat(path)
        if real is not None and self.is_above(real):
            return True
        parts = path.strip("/").split("/")
        steps = ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        entries = filter(None, map(self.disk.lstat, steps))
        return any(entry.kind == SYMLINK and self.is_above(entry) for entry in entries)
