"""Pull requests from a local git clone, without network access."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from builder.errors import RemoteError, UsageError
from builder.forge import MERGED, UNKNOWN, PullFacts
from builder.forge.http import ForgeMissing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from builder.forge.reference import PullRef

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
            self._git("rev-parse", "--git-dir")
        except RemoteError as error:
            raise UsageError(f"--forge-clone {folder} is not a git clone: {error}") from None
        self.repositories = {repository.lower()} if repository else self._remotes()

    def _remotes(self) -> set[str]:
        """``owner/repo`` of every remote, lower-case."""
        listed = self._git("config", "--get-regexp", r"remote\..*\.url", missing_ok=True)
        urls = (line.partition(" ")[2] for line in listed.splitlines())
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
        found = self._git("merge-base", target, commit, missing_ok=True).strip()
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
        return self._run("diff-tree", *options, base, commit).stdout

    def releases_with(self, repository: str, commit: str) -> tuple[str, ...] | None:
        del repository
        tags = self._git("tag", "--contains", commit, missing_ok=True).split()
        if not self._git("tag").split():
            return None  # a clone without tags knows no release
        return tuple(sorted(_versions(tags), key=Version))

    def commit(self, repository: str, name: str) -> str:
        return self._commit(name, f"{repository}@{name[:12]}")

    def archive(self, repository: str, commit: str) -> bytes:
        self._commit(commit, f"{repository}@{commit[:12]}")
        return self._run("archive", "--format=tar", "--prefix=source/", commit).stdout

    # -- git

    def _head(self, number: int) -> str:
        patterns = [pattern.format(n=number) for pattern in _HEADS]
        listed = self._git("for-each-ref", "--format=%(objectname)", *patterns).split()
        if len(set(listed)) > 1:
            raise RemoteError(
                f"#{number}: the clone {self.folder} has {len(set(listed))} different heads of it",
                hint=f"name one: #{number}@{listed[0][:12]}",
            )
        return listed[0] if listed else ""

    def _merged_as(self, number: int, head: str, main: str) -> str:
        """The commit on the main branch that merged a pull request, or ``""``."""
        if head and self._run("merge-base", "--is-ancestor", head, main).returncode == 0:
            mainline = self._git("rev-list", "--first-parent", main).split()
            if head in mainline:
                return head
            after = self._git("rev-list", "--topo-order", "--ancestry-path", f"{head}..{main}")
            on_main = set(mainline)
            return [commit for commit in after.split() if commit in on_main][-1]
        words = ("log", "--first-parent", "--format=%H %s", "-F", f"--grep=(#{number})", main)
        squashed = [
            line.partition(" ")[0]
            for line in self._git(*words).splitlines()
            if line.endswith(f"(#{number})")  # the form that forges give a squashed merge
        ]
        return squashed[-1] if squashed else ""

    def _main(self) -> str:
        for name in _MAINS:
            found = self._git("rev-parse", "--verify", "-q", f"{name}^{{commit}}", missing_ok=True)
            if found.strip():
                return found.strip()
        raise UsageError(f"--forge-clone {self.folder}: the clone has no commit")

    def _commit(self, name: str, subject: str) -> str:
        """The full name of a commit in the clone."""
        answer = self._run("rev-parse", "--verify", "-q", "--end-of-options", f"{name}^{{commit}}")
        if answer.returncode != 0:
            raise ForgeMissing(
                f"{subject} is not in the clone {self.folder}",
                hint=f"git -C {shlex.quote(str(self.folder))} fetch --all",
            )
        return answer.stdout.decode().strip()

    def _subject(self, commit: str) -> str:
        return self._git("show", "-s", "--format=%s", commit).strip()

    def _date(self, commit: str) -> str:
        return self._git("show", "-s", "--format=%cs", commit).strip()

    def _git(self, *words: str, missing_ok: bool = False) -> str:
        answer = self._run(*words)
        if answer.returncode != 0 and not missing_ok:
            message = answer.stderr.decode("utf-8", "replace").strip()
            raise RemoteError(f"git {words[0]} in {self.folder}: {message}")
        return answer.stdout.decode("utf-8", "replace")

    def _run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_EXTERNAL_DIFF"):
            env.pop(name, None)
        command = ["git", "-C", str(self.folder), "-c", "core.quotePath=false", *words]
        try:
            return subprocess.run(command, env=env, capture_output=True, check=False)
        except FileNotFoundError:
            raise UsageError("git is not installed, and --forge-clone needs it") from None


def _versions(tags: Iterable[str]) -> list[str]:
    """The final releases among tags of the form ``v1.2.3``."""
    found = []
    for tag in tags:
        try:
            version = Version(tag.removeprefix("v"))
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            found.append(str(version))
    return found
