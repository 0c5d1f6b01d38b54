"""Finds releases that a pull request applies to, and those that already have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace
from packaging.version import Version

from builder.applier.edits import top_level
from builder.applier.hunks import judge_hunks
from builder.applier.states import APPLIED, NEEDED, NEEDS_REBUILD, PRE, UPSTREAM
from builder.errors import SparkBuildError
from builder.pulls.releases import Releases, spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.diff import FileDiff, Hunk
    from builder.documents.pulls import Conflict
    from builder.pulls.parts import Pulled
    from builder.pypi.index import PackageIndex
    from builder.pypi.wheels import WheelTree

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
