"""Splits a diff into installed files, compiled sources, and others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.documents.pulls import Pin
    from builder.forge.normalize import Section
    from builder.pulls.projects import Layout, Project

_MAKE_A_LAYER = "spark-build layers new NAME --from-pr PULL"
#: Sources that FlashInfer compiles at run time, and flashinfer-jit-cache ships compiled.
_LATE = re.compile(r"\.(?:cu|cuh|c|cc|cpp|cxx|h|hpp|inl|jinja)$")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Sections by kind; ``installed`` has one list for each layout."""

    project: Project
    installed: tuple[tuple[Layout, tuple[Section, ...]], ...]
    compiled: tuple[Section, ...]
    #: (path, reason) of everything that is not in an installed package
    dropped: tuple[tuple[str, str], ...]

    @property
    def any_installed(self) -> bool:
        """Whether an installed file changes."""
        return any(sections for _, sections in self.installed)

    def late(self) -> tuple[str, ...]:
        """Installed sources that another distribution may ship compiled."""
        if not self.project.prebuilt_by:
            return ()
        found = {s.path for _, sections in self.installed for s in sections if _LATE.search(s.path)}
        return tuple(sorted(found))


def take_apart(
    subject: str,
    sections: Iterable[Section],
    project: Project,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Parts:
    """Sort the sections of a diff; ``include`` and ``exclude`` are fnmatch patterns of paths.

    Raises:
        UsageError: an installed file changes in a way that a text diff cannot express.
    """
    kept, dropped = [], []
    for section in sections:
        path = section.path
        chosen = not include or any(fnmatchcase(path, pattern) for pattern in include)
        if not chosen or any(fnmatchcase(path, pattern) for pattern in exclude):
            dropped.append((path, "left out by the layer"))
        else:
            kept.append(section)
    installed = tuple(
        (layout, tuple(m for s in kept if (m := _moved(subject, s, layout)) is not None))
        for layout in project.layouts
    )
    rest = [s for s in kept if not any(_targets(s, layout) for layout in project.layouts)]
    compiled = []
    for section in rest:
        if any(project.compiled(path) for path in (section.old, section.new) if path):
            compiled.append(section)
        else:
            why = section.special if "submodule" in section.special else ""
            dropped.append((section.path, why or project.why_dropped(section.path)))
    return Parts(
        project=project,
        installed=installed,
        compiled=tuple(compiled),
        dropped=tuple(sorted(dropped)),
    )


def _targets(section: Section, layout: Layout) -> bool:
    return any(layout.target(path) is not None for path in (section.old, section.new) if path)


def _moved(subject: str, section: Section, layout: Layout) -> Section | None:
    """The section with installed paths, or None if it changes no installed file."""
    old = layout.target(section.old) if section.old else None
    new = layout.target(section.new) if section.new else None
    if old is None and new is None:
        return None
    if section.special:
        raise UsageError(
            f"{subject} changes {section.path}, which is installed and is {section.special}; "
            f"a layer can leave the file out with 'exclude'",
            hint=_MAKE_A_LAYER,
        )
    if (section.old and old is None) or (section.new and new is None):
        way = "into" if new else "out of"
        raise UsageError(
            f"{subject} moves {section.old} to {section.new}, {way} the installed package, but a "
            f"diff does not contain the whole file; a layer can leave the file out with 'exclude'",
            hint=_MAKE_A_LAYER,
        )
    return section.moved(old, new)


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A pull request in a layer."""

    layer: str
    pin: Pin
    parts: Parts
