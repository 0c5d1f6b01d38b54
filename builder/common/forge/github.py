"""Pull requests through the REST API of GitHub, or of a compatible server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from builder.common.forge import CLOSED, MAX_ARCHIVE, MERGED, PullFacts
from builder.common.forge.http import ForgeMissing
from builder.common.forge.normalize import MAX_DIFF
from builder.errors import RemoteError

if TYPE_CHECKING:
    from builder.common.forge.http import ForgeClient
    from builder.common.forge.reference import PullRef

_JSON = "application/vnd.github+json"
_DIFF = "application/vnd.github.diff"
_FULL = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
#: Phrases that name a superseding pull request.
_SUPERSEDED = re.compile(
    r"(?:supersed|replac)ed\s+(?:by|with)|\bin\s+favou?r\s+of\b", re.IGNORECASE
)
_NAMED = re.compile(
    r"(?:(?P<repository>[\w-]+/[\w.-]+)?#|https://[\w.:-]+/(?P<page>[\w-]+/[\w.-]+)/pull/)"
    r"(?P<number>\d+)"
)


_Sha = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$(?!\n)")]
_Moment = Annotated[str, Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T")]
#: Goes into the paths of further requests.
_Repository = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][\w-]*/(?!\.{1,2}$)[A-Za-z0-9._-]+$(?!\n)")]
T = TypeVar("T")


# Answers of the API, as far as they are used.
# https://docs.github.com/en/rest/pulls/pulls#get-a-pull-request
# https://docs.github.com/en/rest/commits/commits#get-a-commit, #compare-two-commits


class _Object(Struct):
    sha: _Sha


class _Project(Struct):
    full_name: _Repository


class _Target(Struct):
    sha: _Sha
    repo: _Project


class _Pull(Struct):
    number: int
    state: Literal["open", "closed"]
    head: _Object
    base: _Target
    title: str | None = None
    body: str | None = None
    merged_at: _Moment | None = None
    merge_commit_sha: _Sha | None = None
    html_url: str | None = None


class _Signer(Struct):
    date: _Moment | None = None


class _Inner(Struct):
    message: str
    committer: _Signer | None = None


class _Commit(Struct):
    sha: _Sha
    commit: _Inner
    parents: list[_Object]
    html_url: str | None = None

    @property
    def day(self) -> str:
        """The day on which it was committed, or ``""``."""
        committer = self.commit.committer
        return ((committer and committer.date) or "")[:10]


class _Based(Struct):
    merge_base_commit: _Object


class _Ahead(Struct):
    status: str
    ahead_by: int


class _Comment(Struct):
    body: str | None = None


class GitHub:
    """The forge behind an API."""

    def __init__(self, client: ForgeClient) -> None:
        self._client = client

    def facts(self, ref: PullRef) -> PullFacts:
        return self._pull(ref) if ref.number else self._commit(ref)

    def _pull(self, ref: PullRef) -> PullFacts:
        subject = f"{ref.repository}#{ref.number}"
        path = f"/repos/{ref.repository}/pulls/{ref.number}"
        pull = self._read(path, subject, _Pull)
        if pull.number != ref.number:
            raise self._odd(subject, f"it is about number {pull.number}")
        repository, head = pull.base.repo.full_name, pull.head.sha
        state = MERGED if pull.merged_at else pull.state
        notice = ""
        commit = head
        if ref.commit:
            commit = self._full_name(repository, ref.commit)
            notice = self._off_head(repository, commit, head)
        return PullFacts(
            repository=repository,
            number=ref.number,
            commit=commit,
            target=pull.base.sha,
            title=pull.title or "",
            state=state,
            merge_commit=pull.merge_commit_sha or "" if pull.merged_at else "",
            merged_at=(pull.merged_at or "")[:10],
            superseded_by=self._superseded(pull, repository, ref) if state == CLOSED else "",
            url=pull.html_url or "",
            notice=notice,
        )

    def _commit(self, ref: PullRef) -> PullFacts:
        subject = str(ref)
        commit = self._named(ref.repository, ref.commit, subject)
        if not commit.parents:
            raise RemoteError(f"{subject} is the first commit, so it has no parent")
        url = commit.html_url or ""
        page = re.search(r"//[^/]+/([\w.-]+/[\w.-]+)/commit/", url, re.ASCII)
        return PullFacts(
            repository=page[1] if page else ref.repository,
            commit=commit.sha,
            target=commit.parents[0].sha,
            title=commit.commit.message.partition("\n")[0],
            merge_commit=commit.sha,
            merged_at=commit.day,
            url=url,
        )

    def merge_base(self, repository: str, target: str, commit: str) -> str:
        subject = f"{repository}: {target[:12]}...{commit[:12]}"
        path = f"/repos/{repository}/compare/{target}...{commit}"
        return self._read(path, subject, _Based).merge_base_commit.sha

    def date(self, repository: str, commit: str) -> str:
        subject = f"{repository}@{commit[:12]}"
        day = self._named(repository, commit, subject).day
        if not day:
            raise self._odd(subject, "the commit has no date")
        return day

    def diff(self, repository: str, base: str, commit: str) -> bytes:
        path = f"/repos/{repository}/compare/{base}...{commit}"
        return self._client.get(path, _DIFF, f"{repository}@{commit[:12]}", limit=MAX_DIFF)

    def releases_with(self, repository: str, commit: str) -> tuple[str, ...] | None:
        del repository, commit
        return None  # one question per tag: the files of the releases answer it instead

    def commit(self, repository: str, name: str) -> str:
        return self._full_name(repository, name)

    def archive(self, repository: str, commit: str) -> bytes:
        path, subject = f"/repos/{repository}/tarball/{commit}", f"{repository}@{commit[:12]}"
        return self._client.get(path, _JSON, subject, limit=MAX_ARCHIVE)

    # -- shared

    def _read(self, path: str, subject: str, form: type[T]) -> T:
        """An answer as a typed value.

        Raises:
            RemoteError: it has another form, as those of other servers and of error pages.
        """
        data = self._client.get(path, _JSON, subject)
        try:
            return msgspec.json.decode(data, type=form)
        except (ValueError, RecursionError) as error:
            raise self._odd(subject, f"{type(error).__name__}: {error}") from None

    def _odd(self, subject: str, problem: str) -> RemoteError:
        return RemoteError(
            f"{subject}: {self._client.site.host} did not answer like GitHub's API ({problem})",
            hint="SPARK_BUILD_FORGE should be the address of the API",
        )

    def _named(self, repository: str, name: str, subject: str) -> _Commit:
        """The commit of this name, or of this beginning of a name."""
        found = self._read(f"/repos/{repository}/commits/{name}", subject, _Commit)
        if not found.sha.startswith(name):
            raise self._odd(subject, f"it is about commit {found.sha}")
        return found

    def _full_name(self, repository: str, commit: str) -> str:
        if _FULL.fullmatch(commit):
            return commit
        return self._named(repository, commit, f"{repository}@{commit}").sha

    def _off_head(self, repository: str, commit: str, head: str) -> str:
        """A notice if a named commit is not part of the pull request's current head."""
        if commit == head:
            return ""
        subject = f"{repository}: {commit[:12]}...{head[:12]}"
        path = f"/repos/{repository}/compare/{commit}...{head}"
        try:
            compared = self._read(path, subject, _Ahead)
        except ForgeMissing:
            compared = _Ahead(status="diverged", ahead_by=0)
        if compared.status == "ahead":
            return f"its head is now {head[:12]}, {compared.ahead_by} commits ahead"
        return f"{commit[:12]} is not in the history of its head, now {head[:12]}"

    def _superseded(self, pull: _Pull, repository: str, ref: PullRef) -> str:
        """The pull request that supersedes this one, if its text or a comment says so."""
        path = f"/repos/{repository}/issues/{ref.number}/comments?per_page=100"
        comments = self._read(path, f"comments of {ref}", list[_Comment])
        texts = [pull.body or "", *(comment.body or "" for comment in comments)]
        for text in reversed(texts):
            for mention in _SUPERSEDED.finditer(text):
                named = _NAMED.search(text, mention.end(), mention.end() + 160)
                if named:
                    where = named["repository"] or named["page"] or repository
                    return f"{where}#{named['number']}"
        return ""
