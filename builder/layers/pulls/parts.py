"""Sorts the files of a diff: installed ones, compiled sources, and others."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

from builder.applier.versions import normalize
from builder.common.paths import package_file
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.common.diffs import Section
    from builder.common.documents.pulls import Pin

# ------------------------------------------------------------------------ projects and their layout


#: Compiled sources, in repositories without a description.
_COMPILED = re.compile(
    r"(?:\.(?:cu|cuh|c|cc|cpp|cxx|h|hpp|inl|cmake|pyx|pxd|rs|S)|(?:^|/)(?:CMakeLists\.txt))$"
)
#: Folders whose files are never in a wheel.
_BESIDE = re.compile(r"^(?:tests?|docs?|benchmarks?|examples?|tools|scripts|ci|docker|\.[^/]+)/")
#: Messages on what a change of these files means for a built wheel.
_BUILD_FILES = re.compile(r"^(?:setup\.(?:py|cfg)|pyproject\.toml|requirements[^/]*(?:/.*)?)$")
_DOCUMENTS = (".md", ".rst")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Folders of a repository and their installed paths, for a range of versions."""

    when: Mapping[str, str]
    roots: tuple[tuple[str, str], ...]
    #: the distribution whose wheel has the files; empty means the package itself
    wheel: str = ""

    def target(self, path: str) -> str | None:
        """The path below site-packages, or None for a file that is not installed."""
        if path.endswith(_DOCUMENTS):
            return None
        for folder, becomes in self.roots:
            if path.startswith(folder):
                return becomes + path.removeprefix(folder)
            if path.startswith(becomes):  # a patch made in site-packages
                return path
        return None


@dataclass(frozen=True, kw_only=True)
class Project:
    """A repository and its distribution."""

    repository: str
    package: str
    layouts: tuple[Layout, ...]
    rebuilt: tuple[str, ...] = ()
    #: a distribution that ships the compiled form of sources that are otherwise compiled at run
    #: time
    prebuilt_by: str = ""
    described: bool = True

    def owns(self, path: str) -> bool:
        """Whether the file is in the project's package, in the repository or installed."""
        return any(path.startswith(layout.roots[0]) for layout in self.layouts)

    def compiled(self, path: str) -> bool:
        """Whether a file is compiled into a wheel."""
        if self.described:
            return any(fnmatchcase(path, pattern) for pattern in self.rebuilt)
        return bool(_COMPILED.search(path)) and not _BESIDE.match(path)

    @staticmethod
    def why_dropped(path: str) -> str:
        """The kind of a file that is not in a wheel."""
        if _BUILD_FILES.match(path):
            return "defines the build or the requirements of the package"
        if path.endswith(_DOCUMENTS) or path.startswith("docs/"):
            return "documentation"
        if re.match(r"tests?/", path) or "/tests/" in path:
            return "a test"
        return "not part of the installed package"


@cache
def _described() -> dict[str, Project]:
    raw = tomllib.loads(package_file("layers", "pulls", "projects.toml").read_text("utf-8"))
    return {
        entry["repository"].lower(): Project(
            repository=entry["repository"],
            package=entry["package"],
            rebuilt=tuple(entry.get("rebuilt", ())),
            prebuilt_by=entry.get("prebuilt-by", ""),
            layouts=tuple(
                Layout(
                    when=item.get("when", {}),
                    roots=tuple((a, b) for a, b in item["roots"]),
                    wheel=item.get("wheel", ""),
                )
                for item in entry["layouts"]
            ),
        )
        for entry in raw["project"]
    }


def described_projects() -> tuple[Project, ...]:
    """The projects of ``projects.toml``."""
    return tuple(_described().values())


def project_of(repository: str, paths: Sequence[str]) -> Project | None:
    """The description of a repository, else a guess from its name and the changed files.

    A fork with the same name uses the description of the original.

    None if no changed file is in a Python package with the repository's name.
    """
    known = _described().get(repository.lower())
    if known is not None:
        return known
    name = repository.partition("/")[2].lower()
    fork = next((p for key, p in _described().items() if key.endswith(f"/{name}")), None)
    if fork is not None and any(fork.owns(path) or fork.compiled(path) for path in paths):
        return fork
    module = re.sub(r"[-.]+", "_", name.removesuffix("-python"))
    roots = [(f"{below}{module}/", f"{module}/") for below in ("src/", "python/", "")]
    used = tuple(root for root in roots if any(path.startswith(root[0]) for path in paths))
    if not used:
        return None
    return Project(
        repository=repository,
        package=normalize(name),
        layouts=(Layout(when={}, roots=used),),
        described=False,
    )


def mapped(
    project: Project | None, repository: str, package: str, roots: Mapping[str, str]
) -> Project:
    """A repository as a layer's ``map`` describes it; compiled sources as in the description."""
    return Project(
        repository=repository,
        package=package,
        layouts=(Layout(when={}, roots=tuple(roots.items())),),
        rebuilt=project.rebuilt if project else (),
        prebuilt_by=project.prebuilt_by if project else "",
        described=bool(project and project.described),
    )


# ------------------------------------------------------------------------------ the parts of a diff


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
