"""Finds which released wheels have the text before or after a change.

Few files of few wheels are read, by range, and cached; files that were read before
cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace
from packaging.version import Version

from builder.applier.diff import parse_diff
from builder.applier.edits import top_level
from builder.applier.files import judge_diff
from builder.applier.hunks import judge_hunks
from builder.applier.states import APPLIED, NEEDED, NEEDS_REBUILD, POST, PRE, UPSTREAM
from builder.applier.versions import all_match
from builder.common.model.platform import Platform
from builder.common.wheels import RemoteWheel, WheelTree
from builder.errors import SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.applier.diff import FileDiff, Hunk
    from builder.common.diffs import Section
    from builder.common.documents.pulls import Conflict
    from builder.common.pypi import PackageIndex
    from builder.layers.pulls.parts import Layout, Parts, Project, Pulled

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
        found = total = 0
        wanted = telling.get(number, {})
        tree.preload(list(wanted))
        for path, lines in wanted.items():
            data = tree.read(path) or b""
            there = {line.strip() for line in data.decode("utf-8", "replace").splitlines()}
            found += len(lines & there)
            total += len(lines)
        return found / total if total else 0.0

    def _holds(self, version: str, parts: Parts) -> bool:
        tree, layout = self.tree(version), self.layout(version)
        if tree is None or layout is None:
            return False
        _, sections = parts.installed[self._project.layouts.index(layout)]
        diff = b"".join(section.render() for section in sections).decode("utf-8")
        return bool(sections) and judge_diff(parse_diff(diff), tree).found == POST

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
    found: dict[int, dict[str, set[str]]] = {}
    for number, (_, sections) in enumerate(parts.installed):
        for section in sections:
            lines = _added(section) if section.new else set()
            if lines:
                found.setdefault(number, {})[section.path] = lines
    return found


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
        found = []
        for conflict in conflicts:
            if conflict.path not in told:
                told.add(conflict.path)
                hunks = by_path[conflict.path].hunks
                hunk = hunks[conflict.hunk - 1] if hunks else None
                conflict = replace(conflict, history=self._fits(conflict.path, hunk, releases))
            found.append(conflict)
        return found

    def _fits(self, path: str, hunk: Hunk | None, releases: Releases) -> str:
        def holds(tree: WheelTree) -> bool:
            data = tree.read(path)
            if data is None or hunk is None:
                return data is not None
            verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), [hunk])
            return verdicts[0].found == PRE

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
