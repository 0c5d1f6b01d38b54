"""Turns pull requests into layers: from a forge's diff to ops that work offline.

Pins are recorded in ``pins.toml`` of a layer's folder, or in the lock of a project.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import structs
from packaging.version import Version

from builder.applier.diff import judge_hunks, lines_of, parse_diff
from builder.applier.edits import judge_diff, judge_file, top_level
from builder.applier.layers import Diff, Layer, Pull, counts
from builder.applier.states import (
    AMBIGUOUS,
    APPLIED,
    DRIFT,
    NEEDED,
    NEEDS_REBUILD,
    POST,
    PRE,
    UPSTREAM,
)
from builder.applier.trees import OverlayTree
from builder.applier.values import all_match, normalize
from builder.common.console import console, some_of
from builder.common.diffs import read_sections
from builder.common.forge import MERGED, parse_pull
from builder.common.paths import package_file
from builder.common.plan import Conflict, DroppedFile, PatchedFile, Platform, PullReport, read_pin
from builder.common.wheels import RemoteWheel, WheelTree
from builder.errors import SparkBuildError, UsageError
from builder.layers.catalog import Selection, has_pulls, order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.applier.diff import FileDiff, Hunk
    from builder.applier.trees import Tree
    from builder.common.diffs import Section
    from builder.common.forge import PullRef, PullStore
    from builder.common.plan import BuildPlan, HunkState, LayerDecision, Pin
    from builder.common.pypi import PackageIndex
    from builder.compile.stage import RejectedDiff
    from builder.images.subject import Subject


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
    raw = tomllib.loads(package_file("data", "projects.toml").read_text("utf-8"))
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
        paths = {s.path for _, sections in self.installed for s in sections if _LATE.search(s.path)}
        return tuple(sorted(paths))


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
    included, dropped = [], []
    for section in sections:
        path = section.path
        chosen = not include or any(fnmatchcase(path, pattern) for pattern in include)
        if not chosen or any(fnmatchcase(path, pattern) for pattern in exclude):
            dropped.append((path, "left out by the layer"))
        else:
            included.append(section)
    installed = tuple(
        (layout, tuple(m for s in included if (m := _moved(subject, s, layout)) is not None))
        for layout in project.layouts
    )
    rest = [s for s in included if not any(_targets(s, layout) for layout in project.layouts)]
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
            f"a layer can leave the file out",
            hint=_new_layer(subject, "--exclude", section.path),
        )
    if (section.old and old is None) or (section.new and new is None):
        way = "into" if new else "out of"
        raise UsageError(
            f"{subject} moves {section.old} to {section.new}, {way} the installed package, but a "
            f"diff does not contain the whole file; a layer can leave the file out",
            hint=_new_layer(subject, "--exclude", section.path),
        )
    return section.moved(old, new)


def _new_layer(request: str, *options: str) -> str:
    """The command that makes a layer of a pull request, with options."""
    return f"spark-build layers new NAME --from-pr {shlex.join([request, *options])}"


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A pull request in a layer."""

    layer: str
    pin: Pin
    parts: Parts


# --------------------------------------------------------------------- releases that have the text
#
# Few files of few wheels are read, by range, and cached; files that were read before
# cost nothing.

#: Wheels to read for one question: about 1 MB of ranges each.
MAX_WHEELS = 10
#: Added lines shorter than this are too common to identify a release.
_TELLING = 12
#: Releases to search after the first that has most of a change.
_FOLLOWING = 3


class Releases:
    """The final releases of one project, and the files in their wheels."""

    def __init__(self, index: PackageIndex, project: Project) -> None:
        self._index, self._project = index, project
        self._trees: dict[str, WheelTree | None] = {}

    def versions(self) -> list[str]:
        """Final releases, oldest first.

        Raises:
            RemoteError: the package index does not respond.
            UsageError: the package is not on it.
        """
        named = self._index.releases(self._project.package)
        return [version for version in named if not Version(version).is_prerelease]

    def layout(self, version: str) -> Layout | None:
        """The layout of the files in a release."""
        packages = {self._project.package: version}
        return next((x for x in self._project.layouts if all_match(x.when, packages)), None)

    def tree(self, version: str) -> WheelTree | None:
        """The files of a release; None if it has no wheel for arm64 or amd64."""
        if version not in self._trees:
            self._trees[version] = self._open(version)
        return self._trees[version]

    def _open(self, version: str) -> WheelTree | None:
        layout = self.layout(version)
        if layout is None:
            return None
        for architecture in ("arm64", "amd64"):
            platform = Platform(architecture=architecture)
            name = layout.wheel or self._project.package
            try:
                file = self._index.choose(name, version, platform)
            except SparkBuildError:
                continue
            return WheelTree([RemoteWheel(file, self._index)])
        return None

    # -- which release brought a change

    def first_with(self, parts: Parts) -> str:
        """The first release that has the whole change, or ``""``.

        Most of its added lines are in that release and later ones, until they are edited
        again: so a bisection looks for releases with most lines, and the whole change is
        then searched in the found release and the next few.
        """
        telling = _telling(parts)
        versions = self.versions()
        if not telling or not versions:
            return ""
        low, high = 0, len(versions)
        while low < high:
            middle = (low + high) // 2
            if self._share(versions[middle], telling) >= 0.5:
                high = middle
            else:
                low = middle + 1
        after = versions[low : low + 1 + _FOLLOWING]
        return next((version for version in after if self._holds(version, parts)), "")

    def _share(self, version: str, telling: Mapping[int, Mapping[str, set[str]]]) -> float:
        """The share of added lines that a release has, from 0 to 1."""
        tree, layout = self.tree(version), self.layout(version)
        if tree is None or layout is None:
            return 0.0
        number = self._project.layouts.index(layout)
        present = total = 0
        wanted = telling.get(number, {})
        tree.preload(list(wanted))
        for path, lines in wanted.items():
            data = tree.read(path) or b""
            there = {line.strip() for line in data.decode("utf-8", "replace").splitlines()}
            present += len(lines & there)
            total += len(lines)
        return present / total if total else 0.0

    def _holds(self, version: str, parts: Parts) -> bool:
        tree, layout = self.tree(version), self.layout(version)
        if tree is None or layout is None:
            return False
        _, sections = parts.installed[self._project.layouts.index(layout)]
        diff = b"".join(section.render() for section in sections).decode("utf-8")
        return bool(sections) and judge_diff(parse_diff(diff), tree).form == POST

    # -- which releases hold a text

    def around(
        self, version: str, holds: Callable[[WheelTree], bool]
    ) -> tuple[list[str], dict[str, bool]]:
        """All releases, with the result of a test for those nearest to a version."""
        versions = self.versions()
        near = sum(Version(v) < Version(version) for v in versions)
        by_distance = sorted(range(len(versions)), key=lambda at: (abs(at - near), at))
        asked: dict[str, bool] = {}
        for at in by_distance:
            tree = self.tree(versions[at])
            if tree is not None:
                asked[versions[at]] = holds(tree)
            if len(asked) >= MAX_WHEELS:
                break
        return versions, asked


def _telling(parts: Parts) -> dict[int, dict[str, set[str]]]:
    """Added lines that identify a release, by layout and installed path."""
    telling: dict[int, dict[str, set[str]]] = {}
    for number, (_, sections) in enumerate(parts.installed):
        for section in sections:
            lines = _added(section) if section.new else set()
            if lines:
                telling.setdefault(number, {})[section.path] = lines
    return telling


def _added(section: Section) -> set[str]:
    def stripped(mark: bytes) -> Iterable[str]:
        lines = (line for line in section.hunks if line.startswith(mark))
        return (line[1:].decode("utf-8").strip() for line in lines)

    old = {*stripped(b"-"), *stripped(b" ")}
    return {line for line in stripped(b"+") if len(line) >= _TELLING and line not in old}


def spans(versions: list[str], asked: Mapping[str, bool], wanted: bool) -> str:
    """Releases with a result, as ranges: ``0.21.0 … 0.22.1, 0.24.0``."""
    runs: list[list[str]] = []
    unbroken = False
    for version in versions:
        if asked.get(version) is wanted:
            if unbroken:
                runs[-1].append(version)
            else:
                runs.append([version])
        unbroken = asked.get(version) is wanted
    return ", ".join(r[0] if len(r) == 1 else f"{r[0]} … {r[-1]}" for r in runs)


# ------------------------------------------------------------------- what a pull request applies to


#: Definitions that a hint lists at most.
_NAMED = 6


@dataclass(frozen=True)
class History:
    """One pull request, the base's packages, and the layers that changed its files before."""

    entry: Pulled
    packages: Mapping[str, str]
    changers: Mapping[str, str]
    index: PackageIndex

    @property
    def _package(self) -> str:
        return self.entry.parts.project.package

    @property
    def _version(self) -> str:
        return self.packages.get(self._package, "0")

    # -- conflicts

    def added_to(
        self, conflicts: Sequence[Conflict], changes: Sequence[FileDiff]
    ) -> list[Conflict]:
        """The conflicts; the first of each file has the releases that match."""
        by_path = {change.old or change.path: change for change in changes}
        releases = Releases(self.index, self.entry.parts.project)
        told: set[str] = set()
        explained = []
        for conflict in conflicts:
            if conflict.path not in told:
                told.add(conflict.path)
                hunks = by_path[conflict.path].hunks
                hunk = hunks[conflict.hunk - 1] if hunks else None
                conflict = structs.replace(
                    conflict, history=self._fits(conflict.path, hunk, releases)
                )
            explained.append(conflict)
        return explained

    def _fits(self, path: str, hunk: Hunk | None, releases: Releases) -> str:
        def holds(tree: WheelTree) -> bool:
            data = tree.read(path)
            if data is None or hunk is None:
                return data is not None
            verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), [hunk])
            return verdicts[0].form == PRE

        try:
            versions, asked = releases.around(self._version, holds)
        except SparkBuildError as error:
            return f"no release was checked: {error}"
        what = "this hunk's text" if hunk is not None else "the file"
        there, missing = spans(versions, asked, True), spans(versions, asked, False)
        if asked.get(self._version) and path in self.changers:
            return (
                f"{what} is in {self._package} {self._version} itself; layer "
                f"{self.changers[path]} changed these lines first"
            )
        if not there:
            return f"{what} is in none of the {len(asked)} releases nearest to {self._version}"
        return f"{what} is in {self._package} {there}" + (f", not in {missing}" if missing else "")

    # -- hints

    def hints(self, state: str) -> list[str]:
        """Hints for a better way, if there is one."""
        return list(self._hints(state))

    def _hints(self, state: str) -> Iterator[str]:
        pin = self.entry.pin
        if pin.superseded_by:
            yield f"{pin.request} was closed in favour of {pin.superseded_by}"
        if state in (APPLIED, UPSTREAM):
            yield f"{pin.request} is already in this base; remove it from the selection"
            return
        if pin.release and Version(self._version) >= Version(pin.release):
            yield (
                f"{pin.request} was released with {self._package} {pin.release}, and "
                f"{self._version} has the old text, so it was reverted"
            )
        elif pin.release and self.entry.parts.any_installed:
            names = self._grafts()
            yield (
                f"{pin.request} is released: {self._package} {pin.release} has it; graft "
                f'{names or "it"} from there (op = "graft", from = '
                f'"{self._package}=={pin.release}"), which works without the forge'
            )
        if pin.number and pin.merge_commit and state not in (NEEDED, NEEDS_REBUILD):
            yield (
                f"the merged commit may fit better: --with-pr "
                f"{pin.repository}@{pin.merge_commit[:12]}"
            )

    def _grafts(self) -> str:
        """Definitions that the change added or rewrote, in the release's version."""
        try:
            tree = Releases(self.index, self.entry.parts.project).tree(self.entry.pin.release)
        except SparkBuildError:
            return ""
        names: list[str] = []
        for _, sections in self.entry.parts.installed:
            for section in sections:
                data = tree.read(section.new) if tree and section.new else None
                if data is not None and section.path.endswith(".py"):
                    added = {x[1:].rstrip() for x in section.hunks if x.startswith(b"+")}
                    names += _rewritten(data, added)
        return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _rewritten(data: bytes, added: set[bytes]) -> list[str]:
    """Top-level definitions of a module whose lines were mostly added."""
    try:
        definitions = top_level(data.decode("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    lines = data.split(b"\n")
    names = []
    for name, (start, end) in definitions.items():
        body = [line.rstrip() for line in lines[start:end] if line.strip()]
        if body and sum(line in added for line in body) * 2 > len(body):
            names.append(name)
    return names


# ----------------------------------------------------------------------------- the state on a base
#
# Hunks that do not match are shown with both texts side by side, and with the releases that match.

# -------------------------------------------------------------------------- hunks that do not match


#: Part of a hunk's text that must be near a place to show that place.
_NEAR = 0.3
#: Limit of a file's lines times its conflicts for which the nearest text is looked up: about 5 s.
_SEARCHED = 10_000_000


def conflicts_of(change: FileDiff, tree: Tree) -> list[Conflict]:
    """The hunks of a file that match neither the old nor the new text."""
    path = change.old or change.path
    data = tree.read(path)
    if data is None:
        data = tree.read(change.path)
    if data is None:
        return [Conflict(path=path, hunk=1, line=0, why="the file is not in the base")]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return [Conflict(path=path, hunk=1, line=0, why="the file is not UTF-8 text")]
    verdicts, _ = judge_hunks(text, change.hunks)
    lines = lines_of(text)
    conflicts: list[Conflict] = []
    for number, (hunk, verdict) in enumerate(zip(change.hunks, verdicts, strict=True), 1):
        if verdict.form == DRIFT:
            near = len(lines) * (len(conflicts) + 1) <= _SEARCHED
            conflicts.append(_missing(path, number, hunk, lines if near else None))
        elif verdict.form == AMBIGUOUS:
            why = f"the text occurs more than once ({verdict.reason})"
            expected = tuple(_shown(hunk.old))
            conflicts.append(
                Conflict(path=path, hunk=number, line=hunk.start, why=why, expected=expected)
            )
    return conflicts


def _missing(path: str, number: int, hunk: Hunk, lines: Sequence[str] | None) -> Conflict:
    if lines is None:
        why = "the text is not in the file; the nearest was not looked up, there are too many"
        return Conflict(path=path, hunk=number, line=hunk.start, why=why)
    start = nearest(lines, hunk.old, hunk.start - 1)
    near = list(lines[start : start + len(hunk.old)]) if start is not None else []
    why = "the file has no similar text" if start is None else "the text differs"
    if near and [x.strip() for x in near] == [x.strip() for x in hunk.old]:
        why = "only whitespace or line endings differ"
    return Conflict(
        path=path,
        hunk=number,
        line=hunk.start,
        why=why,
        expected=tuple(_shown(hunk.old)),
        found_line=0 if start is None else start + 1,
        found=tuple(_shown(near)),
    )


def _shown(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        text = line.removesuffix("\n")
        yield f"{text.removesuffix(chr(13))}\\r" if text.endswith("\r") else text


def nearest(lines: Sequence[str], wanted: Sequence[str], hint: int) -> int | None:
    """The line (from 0) near which most of the wanted lines are; the one nearest ``hint`` if equal.

    None if less than a third of the text is found together.
    """
    weights = {line.strip(): len(line.strip()) for line in wanted}
    total = sum(len(line.strip()) for line in wanted)
    worth = [weights.get(line.strip(), 0) for line in lines]
    size = len(wanted)
    best, score, running = None, 0, sum(worth[:size])
    for start in range(max(1, len(lines) - size + 1)):
        closer = best is None or abs(start - hint) < abs(best - hint)
        if running > score or (running == score and running and closer):
            best, score = start, running
        if start + size < len(worth):
            running += worth[start + size] - worth[start]
    return best if score >= _NEAR * total and score else None


# --------------------------------------------------------------------------------------- the report


def report_pulls(
    plan: BuildPlan,
    base: Subject,
    pulled: Mapping[str, list[Pulled]],
    index: PackageIndex,
    rejected_diffs: Mapping[str, RejectedDiff] | None = None,
) -> list[PullReport]:
    """A report on every pull request of a plan, in its order.

    Args:
        plan: the plan.
        base: the base.
        pulled: the pull requests, by layer.
        index: the package index.
        rejected_diffs: the sources that a pull request's diff does not match, by request.
    """
    reports = []
    view = OverlayTree(base.tree)
    changers: dict[str, str] = {}
    for decision in plan.decisions:
        for entry in pulled.get(decision.name, []):
            history = History(entry, plan.base.packages, changers, index)
            rejected = (rejected_diffs or {}).get(entry.pin.request)
            reports.append(_report(decision, entry, view, history, rejected))
        view.update(decision.changes)
        changers.update(dict.fromkeys(decision.changes, decision.name))
    return reports


def _report(
    decision: LayerDecision,
    entry: Pulled,
    tree: Tree,
    history: History,
    rejected: RejectedDiff | None,
) -> PullReport:
    changes = list(_changes(decision, entry, history.packages))
    state = decision.outcome.state
    files = tuple(_file(change, tree) for change in changes)
    conflicts: list[Conflict] = []
    if state not in (NEEDED, APPLIED, UPSTREAM):
        for change in changes:
            conflicts += conflicts_of(change, tree)
        conflicts = history.added_to(conflicts, changes)
        conflicts += _in_sources(rejected) if rejected else []
    hints = [*_left_over(entry, files), *history.hints(state)]
    return PullReport(
        **structs.asdict(entry.pin),
        layer=entry.layer,
        in_base=_in_base(state, files),
        installed=files,
        compiled=tuple(section.path for section in entry.parts.compiled),
        dropped=tuple(DroppedFile(path=path, why=why) for path, why in entry.parts.dropped),
        conflicts=tuple(conflicts),
        hints=tuple(hints),
    )


def _in_base(state: str, files: Iterable[PatchedFile]) -> Literal["whole", "part", "no"]:
    if state in (APPLIED, UPSTREAM):
        return "whole"
    return "part" if any(POST in file.hunks for file in files) else "no"


def _in_sources(rejected: RejectedDiff) -> Iterator[Conflict]:
    """Hunks of compiled sources that do not match the release's sources."""
    for change in parse_diff(rejected.diff):
        if change.old is None:
            continue
        for conflict in conflicts_of(change, rejected.tree):
            yield structs.replace(conflict, history=f"the text is that of {rejected.archive}")


def _left_over(entry: Pulled, files: Sequence[PatchedFile]) -> Iterator[str]:
    """The hint for a change that is partly present, and whose rest still applies."""
    findings = {hunk for file in files for hunk in file.hunks}
    if findings == {PRE, POST}:
        there = [file.path for file in files if POST in file.hunks]
        yield (
            f"{entry.pin.request} is partly applied ({', '.join(there[:4])}): a layer can add the "
            f"rest, file by file: spark-build layers new NAME --from-pr, and 'include'"
        )


def _changes(
    decision: LayerDecision, entry: Pulled, packages: Mapping[str, str]
) -> Iterator[FileDiff]:
    """The changes of a pull request to installed packages of this base."""
    for op in decision.layer.ops:
        if isinstance(op, Diff) and op.file == entry.pin.request and counts(op, packages):
            yield from parse_diff(op.diff)


def _file(change: FileDiff, tree: Tree) -> PatchedFile:
    kind: Literal["edit", "new", "delete", "rename", "mode"] = "edit"
    if change.old is None or change.new is None:
        kind = "new" if change.old is None else "delete"
    elif change.old != change.new:
        kind = "rename"
    elif not change.hunks:
        kind = "mode"
    data = tree.read(change.path)
    if kind in ("edit", "rename") and change.hunks and data is not None:
        verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), change.hunks)
        hunks = [cast("HunkState", verdict.form) for verdict in verdicts]
        offsets = [verdict.offset for verdict in verdicts]
    else:
        hunks, offsets = [cast("HunkState", judge_file(change, tree).form)], [0]
    return PatchedFile(path=change.path, change=kind, hunks=tuple(hunks), offsets=tuple(offsets))


# ------------------------------------------------------------------ a layer of pinned pull requests


Table = dict[str, Any]

#: After layers that replace whole distributions (10 to 40), before those that edit vLLM (50).
ORDER = 45
#: Names that a note lists at most.
_LISTED = 6
_some = partial(some_of, most=_LISTED)
#: Distributions whose CUDA sources a stage can compile, and their architectures.
_DISTRIBUTION, _ARCH = "vllm", "12.1a"


def parts_of(
    pin: Pin,
    sections: Sequence[Section],
    op: Pull,
    package: str = "",
) -> Parts:
    """Split a pinned diff with the description of its repository, or of its op.

    Raises:
        UsageError: it is unknown which of its files are installed.
    """
    repository = op.project or pin.repository
    project = project_of(repository, [section.path for section in sections])
    if op.map:
        project = mapped(project, repository, package, op.map)
    if project is None:
        raise UsageError(
            f"{pin.request}: no changed file is in a folder that matches {pin.repository}: "
            f"{_some([section.path for section in sections])}; a layer can name the folders with "
            "'map', or for a fork the upstream repository with 'project'",
            hint=_new_layer(pin.request, "--project", "OWNER/REPO"),
        )
    return take_apart(pin.request, sections, project, op.include, op.exclude)


def ops_of(pin: Pin, parts: Parts, when: Mapping[str, str] | None = None) -> list[Table]:
    """The ops for a pull request; ``when`` is the condition of the replaced op."""
    source = {
        "repository": pin.repository,
        "number": pin.number,
        "commit": pin.commit,
        "sha256": pin.sha256,
    }
    dropped = [list(row) for row in parts.dropped]
    common: Table = {"file": pin.request, "pull": source}
    ops: list[Table] = []
    for layout, sections in parts.installed:
        if sections:
            text = b"".join(section.render() for section in sections).decode("utf-8")
            op = {"op": "diff", **common, "diff": text, "dropped": dropped}
            ops.append(_conditional(op, {**(when or {}), **layout.when}))
    if parts.compiled:
        ops.append(_conditional({**_compile_op(pin, parts), **common}, when or {}))
    late = parts.late()
    if late:
        brought = parts.project.prebuilt_by
        op = {"op": "compile", **common, "files": list(late), "diff": ""}
        op["reason"] = (
            f"{_some(late)} comes compiled from {brought}, and a change to the source has no effect"
        )
        ops.append(_conditional(op, {**(when or {}), brought: ">=0"}))
    return ops


def _compile_op(pin: Pin, parts: Parts) -> Table:
    """The op for compiled sources; with ``source``, a compile stage can build it."""
    paths = [section.path for section in parts.compiled]
    text = b"".join(s.render() for s in parts.compiled if not s.special).decode("utf-8")
    op: Table = {"op": "compile", "files": paths, "diff": text}
    op["reason"] = f"{_some(paths)} reach {parts.project.package} compiled"
    special = next((s for s in parts.compiled if s.special), None)
    if special is not None:
        op["reason"] += f"; {special.path} is {special.special}"
    elif parts.project.package == _DISTRIBUTION:
        op |= {"source": _DISTRIBUTION, "arch": _ARCH, "name": parse_pull(pin.request).layer_name}
    return op


def _conditional(op: Table, when: Mapping[str, str]) -> Table:
    return {**op, "if": dict(when)} if when else op


def notes_of(pin: Pin, parts: Parts) -> list[str]:
    """Notes in the plan about an applied pull request."""
    notes = []
    known = parts.project
    if known.described and known.repository.lower() != pin.repository.lower():
        notes.append(f"{pin.repository} is read as a fork of {known.repository}")
    if parts.dropped:
        names = [path for path, _ in parts.dropped]
        notes.append(f"{pin.request}: not installed, so dropped: {_some(names)}")
    if parts.late():
        late = _some(parts.late())
        notes.append(f"{pin.request}: {late} are compiled at first use")
    return notes


def merged_entry(pin: Pin, package: str) -> Table | None:
    """A layer's entry about its merged change: the first release with it, and its reference."""
    if not pin.release or not pin.merge_commit:
        return None
    return {
        "when": {package: f">={pin.release}"},
        "since": f"{package} {pin.release}",
        "reason": f"merged as {pin.merge_commit[:12]}, which is in {package} {pin.release} and "
        "later; this base has changed there since",
    }


def layer_of(pin: Pin, parts: Parts, name: str, after: Sequence[str]) -> Table:
    """The layer for a pull request from the command line."""
    package = parts.project.package
    every = {package: ">=0"}
    ops = ops_of(pin, parts)
    layer: Table = {
        "name": name,
        "summary": f"{pin.request}: {pin.title}" if pin.title else pin.request,
        "order": ORDER,
        "after": list(after),
        "package": package,
        "provenance": provenance(pin),
        "upstream": [],
        "not-applicable": [],
        "variants": [{"name": pin.short, "when": every, "notes": notes_of(pin, parts), "ops": ops}],
        "pins": {"wheel": [], "donor": []},
        "series": pin.repository.lower(),
    }
    if not ops:
        reason = f"none of its files is installed: {_some([path for path, _ in parts.dropped])}"
        layer["not-applicable"] = [{"when": every, "reason": reason}]
    merged = merged_entry(pin, package)
    return {**layer, "merged": merged} if merged else layer


def provenance(pin: Pin) -> Table:
    """The origin of a pull request in DEP-3 fields."""
    kind = "pull request" if pin.number else "commit"
    value: Table = {
        "origin": f"upstream, {pin.repository} {kind} "
        f"{pin.number or pin.short}{f', {pin.url}' if pin.url else ''}",
        "forwarded": "not-needed",
        "applied-upstream": "no",
        "last-update": pin.date,
    }
    if pin.number:
        value["bug"] = [f"{pin.repository}#{pin.number}"]
    if pin.merge_commit:
        value["applied-upstream"] = f"{pin.release or 'merged'}, {pin.merge_commit}"
    return value


# ----------------------------------------------------------------- the pull requests of a selection


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A selection for the applier, and its pull requests by layer."""

    selection: Selection
    pulled: Mapping[str, list[Pulled]]
    #: pins of pull requests from the command line, by request
    pins: Mapping[str, Pin]


@dataclass(frozen=True)
class Resolver:
    """Turns ``pull`` ops and ``--with-pr`` into rendered layers."""

    store: PullStore
    index: PackageIndex
    #: pins to keep, by request; others are requested from the forge
    pins: Mapping[str, Pin]

    def resolve(self, selection: Selection, requests: Sequence[str]) -> Resolved:
        """Render every pull request of a selection, and additional ones, in order.

        Raises:
            UsageError: a reference is malformed, given twice, or not expressible as text.
            RemoteError: the forge does not respond, or no longer has the pinned commit.
        """
        pulled: dict[str, list[Pulled]] = {}
        layers = [self._layer(layer, pulled) for layer in selection.layers]
        pins: dict[str, Pin] = {}
        refs = [parse_pull(text) for text in requests]
        names = _names(refs, {layer.name for layer in layers})
        after: list[str] = []
        for ref, name in zip(refs, names, strict=True):
            pinned = self.pins.get(str(ref))
            entry = self._pulled(name, pinned or self.store.resolve(ref), Pull(str(ref)))
            if pinned is None and entry.pin.state == MERGED and not entry.pin.release:
                entry = replace(entry, pin=self._released(entry))
            pins[str(ref)] = entry.pin
            pulled[name] = [entry]
            layers.append(Layer.read(layer_of(entry.pin, entry.parts, name, after)))
            after = [name]
        if not layers:
            raise UsageError(
                "nothing is selected; give --layers or --with-pr", hint="spark-build layers list"
            )
        done = Selection(tuple(order(layers)), selection.profiles)
        return Resolved(selection=done, pulled=pulled, pins=pins)

    def _layer(self, layer: Layer, pulled: dict[str, list[Pulled]]) -> Layer:
        """A layer of the catalogue without ``pull`` ops."""
        if not has_pulls(layer):
            return layer
        name = layer.name
        pins = {p.request: p for p in (read_pin(row, name) for row in layer.pins.pull)}
        entries: list[Pulled] = []
        variants = []
        for variant, rendered in zip(layer.variants, layer.rendered["variants"], strict=True):
            ops, notes = [], list(variant.notes)
            for op, raw in zip(variant.ops, rendered["ops"], strict=True):
                if not isinstance(op, Pull):
                    ops.append(raw)
                    continue
                if op.pull not in pins:
                    raise UsageError(
                        f"layer {name}: {op.pull} is not pinned",
                        hint=f"spark-build layers pin {name}",
                    )
                entry = self._pulled(name, pins[op.pull], op, layer.package)
                entries.append(entry)
                ops += ops_of(entry.pin, entry.parts, op.when)
                notes += notes_of(entry.pin, entry.parts)
            variants.append({**rendered, "ops": ops, **({"notes": notes} if notes else {})})
        pulled[name] = list({entry.pin.request: entry for entry in entries}.values())
        others = {key: rows for key, rows in layer.rendered["pins"].items() if key != "pull"}
        changed = {"variants": variants, "pins": others, **_history(layer, entries)}
        return Layer.read({**layer.rendered, **changed})

    def _pulled(self, name: str, pin: Pin, op: Pull, package: str = "") -> Pulled:
        sections = read_sections(self.store.diff(pin))
        parts = parts_of(pin, sections, op, package)
        return Pulled(layer=name, pin=pin, parts=parts)

    def _released(self, entry: Pulled) -> Pin:
        """The pin with the first release that has the change, if wheels show it."""
        release = release_of(entry.pin, entry.parts, self.index)
        return self.store.released(entry.pin, release) if release else entry.pin


def release_of(pin: Pin, parts: Parts, index: PackageIndex) -> str:
    """The first release that has a merged change, by the content of wheels, or ``""``."""
    try:
        return Releases(index, parts.project).first_with(parts)
    except SparkBuildError as error:
        console.detail(f"{pin.request}: cannot find the release that has it: {error}")
        return ""


def _history(layer: Layer, entries: Sequence[Pulled]) -> Table:
    """Merge information of a layer that consists of pull requests of one repository."""
    repositories = {entry.pin.repository.lower() for entry in entries}
    if not all(isinstance(op, Pull) for op in layer.ops) or len(repositories) != 1:
        return {}
    value: Table = {"series": repositories.pop()}
    requests = {entry.pin.request for entry in entries}
    merged = merged_entry(entries[0].pin, entries[0].parts.project.package)
    return {**value, "merged": merged} if merged and len(requests) == 1 else value


def _names(refs: Sequence[PullRef], taken: set[str]) -> list[str]:
    """A layer name for each reference; includes the owner only if necessary."""
    seen: set[str] = set()
    names: list[str] = []
    for ref in refs:
        same = f"{ref.repository.lower()}#{ref.number}" if ref.number else str(ref).lower()
        if same in seen:
            raise UsageError(f"{ref}: the pull request is named twice")
        seen.add(same)
        name = ref.layer_name
        if name in taken:
            kind, _, rest = name.partition("-")
            name = f"{kind}-{ref.owner.lower()}-{rest}"
        if name in taken:
            raise UsageError(f"{ref}: there is a layer {name} already")
        taken.add(name)
        names.append(name)
    return names


# ---------------------------------------------------------------------------- pins in layer folders


def pin_pull(op: Pull, package: str, store: PullStore, index: PackageIndex) -> tuple[Pin, Parts]:
    """Pin an op's pull request in its current state, with the release that has it if merged.

    Raises:
        RemoteError: the forge does not respond, or it does not exist.
        UsageError: its changes cannot be expressed as text.
    """
    pin = store.resolve(parse_pull(op.pull))
    parts = parts_of(pin, read_sections(store.diff(pin)), op, package)
    if pin.state == MERGED and not pin.release:
        pin = structs.replace(pin, release=release_of(pin, parts, index))
    return pin, parts


def refuse_unpinned(layer: Layer) -> None:
    """Raise for a ``pull`` op without a pin.

    Raises:
        UsageError: a ``pull`` op has no pin.
    """
    pinned = {row["request"] for row in layer.pins.pull}
    for op in layer.ops:
        if isinstance(op, Pull) and op.pull not in pinned:
            raise UsageError(
                f"layer {layer.name}: {op.pull} is not pinned",
                hint=f"spark-build layers pin {layer.name}",
            )


# -------------------------------------------------------------------------------------- selections


def without_pulls(
    selection: Selection,
    with_pr: Sequence[str] = (),
    forge_clone: Sequence[str] = (),
    pins: Mapping[str, Pin] | None = None,
) -> Selection:
    """A selection with its pull requests, and additional ones, turned into diffs.

    ``forge_clone`` are local clones to use for their repositories, ``pins`` pins to keep.
    """
    if not with_pr and not any(has_pulls(layer) for layer in selection.layers):
        return selection
    from builder.common.forge import Forges, PullStore
    from builder.common.pypi import PackageIndex

    resolver = Resolver(PullStore(Forges(forge_clone)), PackageIndex(), pins or {})
    return resolver.resolve(selection, with_pr).selection
