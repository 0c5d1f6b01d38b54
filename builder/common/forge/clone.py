"""Pull requests from a local git clone, without network access."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from packaging.version import Version

from builder.common.forge import MAX_ARCHIVE, MERGED, UNKNOWN, PullFacts
from builder.common.forge.git import Git
from builder.common.forge.http import ForgeMissing
from builder.common.forge.normalize import MAX_DIFF
from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from builder.common.forge.reference import PullRef

#: Refs of pull request heads in clones: mirrors, ``gh``-style fetches, named remotes.
_HEADS = ("refs/pull/{n}/head", "refs/remotes/*/pull/{n}/head", "refs/remotes/*/pr/{n}")
#: Possible names of the main branch in clones; the
#: checked-out commit is last.
_MAINS = (
    "refs/remotes/upstream/HEAD",
    "refs/remotes/origin/HEAD",
    "refs/remotes/origin/main",
    "refs/remotes/origin/master",
    "refs/heads/main",
    "refs/heads/master",
    "HEAD",
)
_REMOTE = re.compile(r"[/:]([^/:]+/[^/]+?)(?:\.git)?/?$")


class Clone:
    """One clone.  It knows what was merged, but not whether others are open or closed."""

    def __init__(self, folder: Path, repository: str = "") -> None:
        """Open a clone.

        Raises:
            UsageError: the folder is not a git repository, or git is missing.
        """
        self.folder = folder
        try:
            self._git = Git(folder)
        except RemoteError as error:
            raise UsageError(f"--forge-clone {folder} is not a git clone: {error}") from None
        self.repositories = {repository.lower()} if repository else self._remotes()

    def _remotes(self) -> set[str]:
        """``owner/repo`` of every remote, lower-case."""
        urls = self._git.remote_urls
        return {match[1].lower() for url in urls if (match := _REMOTE.search(url))}

    def holds(self, repository: str) -> bool:
        """Whether this is a clone of the repository, by its remotes; True without remotes."""
        return not self.repositories or repository.lower() in self.repositories

    # -- the interface of a forge

    def facts(self, ref: PullRef) -> PullFacts:
        if not ref.number:
            commit = self._commit(ref.commit, str(ref))
            return PullFacts(
                repository=ref.repository,
                commit=commit,
                target=self._commit(f"{commit}^", f"{ref}: the commit before it"),
                title=self._subject(commit),
                merge_commit=commit,
                merged_at=self._date(commit),
            )
        main = self._main()
        head = ref.commit and self._commit(ref.commit, str(ref))
        head = head or self._head(ref.number)
        merge = self._merged_as(ref.number, head, main)
        if not head and not merge:
            raise ForgeMissing(
                f"{ref}: the clone {self.folder} does not have it",
                hint=f"git -C {shlex.quote(str(self.folder))} fetch origin pull/{ref.number}/head:"
                f"refs/pull/{ref.number}/head",
            )
        commit = head or merge
        return PullFacts(
            repository=ref.repository,
            number=ref.number,
            commit=commit,
            target=self._commit(f"{merge}^", merge) if merge else main,
            title=self._subject(merge or commit),
            state=MERGED if merge else UNKNOWN,
            merge_commit=merge,
            merged_at=self._date(merge) if merge else "",
        )

    def merge_base(self, repository: str, target: str, commit: str) -> str:
        found = self._git.run("merge-base", target, commit, codes=(0, 1)).text
        if not found:
            raise ForgeMissing(
                f"{repository}: {commit[:12]} has no common ancestor with its branch"
            )
        return found

    def date(self, repository: str, commit: str) -> str:
        del repository
        return self._date(commit)

    def diff(self, repository: str, base: str, commit: str) -> bytes:
        for name in (base, commit):
            self._commit(name, f"{repository}@{name[:12]}")
        options = ["-r", "-p", "-M", "-U3", "--no-color", "--no-ext-diff", "--no-textconv"]
        options += ["--src-prefix=a/", "--dst-prefix=b/", "--full-index"]
        return self._git.run("diff-tree", *options, base, commit, limit=MAX_DIFF).data

    def releases_with(self, repository: str, commit: str) -> tuple[str, ...] | None:
        del repository
        if not self._git.run("tag").text:
            return None  # a clone without tags knows no release
        tags = self._git.run("tag", "--contains", commit).text.split()
        return tuple(sorted(_versions(tags), key=Version))

    def commit(self, repository: str, name: str) -> str:
        return self._commit(name, f"{repository}@{name[:12]}")

    def archive(self, repository: str, commit: str) -> bytes:
        self._commit(commit, f"{repository}@{commit[:12]}")
        words = ("archive", "--format=tar", "--prefix=source/", commit)
        return self._git.run(*words, limit=MAX_ARCHIVE).data

    # -- git

    def _head(self, number: int) -> str:
        patterns = [pattern.format(n=number) for pattern in _HEADS]
        listed = self._git.run("for-each-ref", "--format=%(objectname)", *patterns).text.split()
        if len(set(listed)) > 1:
            raise RemoteError(
                f"#{number}: the clone {self.folder} has {len(set(listed))} different heads of it",
                hint=f"name one: #{number}@{listed[0][:12]}",
            )
        return listed[0] if listed else ""

    def _merged_as(self, number: int, head: str, main: str) -> str:
        """The commit on the main branch that merged a pull request, or ``""``."""
        run = self._git.run
        if head and run("merge-base", "--is-ancestor", head, main, codes=(0, 1)).code == 0:
            mainline = run("rev-list", "--first-parent", main).text.split()
            if head in mainline:
                return head
            after = run("rev-list", "--topo-order", "--ancestry-path", f"{head}..{main}")
            on_main = set(mainline)
            return next((x for x in reversed(after.text.split()) if x in on_main), "")
        words = ("log", "--first-parent", "--format=%H %s", "-F", f"--grep=(#{number})", main)
        squashed = [
            line.partition(" ")[0]
            for line in run(*words).text.splitlines()
            if line.endswith(f"(#{number})")  # the form that forges give a squashed merge
        ]
        return squashed[-1] if squashed else ""

    def _main(self) -> str:
        for name in _MAINS:
            found = self._resolved(name)
            if found:
                return found
        raise UsageError(f"--forge-clone {self.folder}: the clone has no commit")

    def _commit(self, name: str, subject: str) -> str:
        """The full name of a commit in the clone."""
        found = self._resolved(name)
        if not found:
            raise ForgeMissing(
                f"{subject} is not in the clone {self.folder}",
                hint=f"git -C {shlex.quote(str(self.folder))} fetch --all",
            )
        return found

    def _resolved(self, name: str) -> str:
        """The full name of a commit, or ``""`` if there is none of this name."""
        words = ("rev-parse", "--verify", "-q", "--end-of-options", f"{name}^{{commit}}")
        return self._git.run(*words, codes=(0, 1)).text

    def _subject(self, commit: str) -> str:
        return self._git.run("show", "-s", "--format=%s", commit).text

    def _date(self, commit: str) -> str:
        return self._git.run("show", "-s", "--format=%cs", commit).text


def _versions(tags: Iterable[str]) -> list[str]:
    """The final releases among tags of the form ``v1.2.3``."""
    found = []
    for tag in tags:
        try:
            version = Version(tag.removeprefix("v"))
        except ValueError:  # InvalidVersion, or a number of thousands of digits
            continue
        if not version.is_prerelease:
            found.append(str(version))
    return found
