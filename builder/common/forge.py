"""Pull requests, from a forge (its REST API) or a local git clone: pinned, and cached by sha256."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
from msgspec import Meta, Struct, structs
from packaging.version import Version

from builder import settings
from builder.applier.values import sha256_hex
from builder.common.console import console
from builder.common.diffs import MAX_DIFF, normalise
from builder.common.document import plain, read
from builder.common.files import write_atomically
from builder.common.paths import cache_dir
from builder.common.plan import Pin, read_pin
from builder.common.retry import (
    NoAnswer,
    Retries,
    RetryPolicy,
    asked_wait,
    host_of,
    resolved,
    server_time,
)
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import requests


# -------------------------------------------------------------------------------------- references

_NAME = r"(?P<owner>[A-Za-z0-9][A-Za-z0-9-]*)/(?P<repo>[A-Za-z0-9._-]+)"
_COMMIT = r"(?P<commit>[0-9a-fA-F]{7,64})"
_SHORT = re.compile(rf"{_NAME}(?:#(?P<number>[1-9][0-9]{{0,9}}))?(?:@{_COMMIT})?")
_PULL_PAGE = re.compile(
    rf"/{_NAME}/pull/(?P<number>[1-9][0-9]{{0,9}})(?:/(?:commits|changes)/{_COMMIT})?(?:/.*)?"
)
_COMMIT_PAGE = re.compile(rf"/{_NAME}/commit/{_COMMIT}(?:\.diff|\.patch)?")
_FORMS = (
    "OWNER/REPO#NUMBER, OWNER/REPO#NUMBER@COMMIT, OWNER/REPO@COMMIT, or the page of one of them"
)


@dataclass(frozen=True, kw_only=True)
class PullRef:
    """A pull request, at its head or at a named commit, or (``number`` 0) a single commit."""

    owner: str
    repo: str
    number: int = 0
    commit: str = ""
    #: host of the given page; empty for short forms
    host: str = ""

    @property
    def repository(self) -> str:
        """``OWNER/REPO``."""
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        number = f"#{self.number}" if self.number else ""
        return f"{self.repository}{number}{f'@{self.commit}' if self.commit else ''}"

    @property
    def layer_name(self) -> str:
        """The name of its layer: ``pr-vllm-12345``, or ``commit-vllm-`` and 12 digits."""
        repo = re.sub(r"[^a-z0-9]+", "-", self.repo.lower()).strip("-") or "repository"
        return f"pr-{repo}-{self.number}" if self.number else f"commit-{repo}-{self.commit[:12]}"


def parse_pull(text: str) -> PullRef:
    """Parse a reference or a page's URL.

    Raises:
        UsageError: the text is neither a reference nor such a URL.
    """
    text = text.strip()
    host = ""
    if re.match(r"https?://", text):
        try:
            parts = urlsplit(text)
            host = (parts.hostname or "").lower()
        except ValueError as error:
            raise UsageError(f"{text[:200]!r} is not an address: {error}") from None
        match = _PULL_PAGE.fullmatch(parts.path.rstrip("/")) or _COMMIT_PAGE.fullmatch(parts.path)
    else:
        match = _SHORT.fullmatch(text)
    groups = match.groupdict() if match else {}
    number, commit = groups.get("number"), groups.get("commit")
    if not match or not (number or commit) or groups["repo"] in (".", ".."):
        hint = f"vllm-project/vllm#{text.lstrip('#')}" if re.fullmatch(r"#?\d+", text) else ""
        raise UsageError(f"{text[:200]!r} is not a pull request or commit: {_FORMS}", hint=hint)
    return PullRef(
        owner=groups["owner"],
        repo=groups["repo"].removesuffix(".git"),
        number=int(number or 0),
        commit=(commit or "").lower(),
        host=host,
    )


# ------------------------------------------------------------------------ the interface of a forge

#: States of a pull request.  A single commit has none, and a clone does not always know.
OPEN, MERGED, CLOSED, UNKNOWN = "open", "merged", "closed", "unknown"
#: Size limit of a repository archive; vLLM's has some tens of megabytes.
MAX_ARCHIVE = 512 << 20


@dataclass(frozen=True, kw_only=True)
class PullFacts:
    """A forge's facts about a pull request, or about a single commit (``number`` is 0).

    ``commit`` is the head (or the commit itself), ``target`` a commit of the target
    branch; commits are full object names.  ``merged_at`` is an ISO 8601 date or empty.
    """

    repository: str
    number: int = 0
    commit: str
    target: str
    title: str = ""
    state: str = UNKNOWN
    merge_commit: str = ""
    merged_at: str = ""
    superseded_by: str = ""
    url: str = ""
    #: notices for the user about the commit
    notice: str = ""


@dataclass(frozen=True, kw_only=True)
class Thread:
    """An issue or pull request: its title, its state, and the day of its last change.

    ``state`` is empty if a clone does not know it.
    """

    title: str = ""
    state: str = ""
    updated: str = ""


class Forge(Protocol):
    """The interface of a forge."""

    def facts(self, ref: PullRef) -> PullFacts:
        """The current facts about a reference.

        Raises:
            RemoteError: the forge does not respond, or the reference does not exist.
        """

    def merge_base(self, repository: str, target: str, commit: str) -> str:
        """The commit that the change is based on."""

    def date(self, repository: str, commit: str) -> str:
        """The date of a commit, ISO 8601."""

    def diff(self, repository: str, base: str, commit: str) -> bytes:
        """The change from ``base`` to ``commit`` as git prints it."""

    def releases_with(self, repository: str, commit: str) -> tuple[str, ...] | None:
        """Versions, oldest first, whose tag contains the commit; None if unknown."""

    def commit(self, repository: str, name: str) -> str:
        """The full name of a commit."""

    def archive(self, repository: str, commit: str) -> bytes:
        """The files of a commit, as a tar that may be compressed, in a folder of any name."""

    def thread(self, repository: str, number: int) -> Thread:
        """An issue or pull request."""

    def commits_of(self, repository: str, path: str, old: str, new: str) -> list[tuple[str, str]]:
        """Commits that changed a path between two tags, the newest first: name and title."""


# ---------------------------------------------------------------------------- the configured forge

#: GitHub's own API and the host of its pages.
GITHUB_API, GITHUB_HOST = "https://api.github.com", "github.com"
#: Path of GitHub Enterprise Server's API.
_ENTERPRISE_PATH = "/api/v3"
#: Our own variable is for the configured forge; the others are for GitHub, or for the server
#: in GITHUB_API_URL or GH_HOST, and are sent to no other host.
_GITHUB_TOKENS = (settings.GITHUB_TOKEN, settings.GH_TOKEN)
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A forge: ``api`` is the root of its REST API, ``host`` the host of its pages."""

    api: str
    host: str
    token: str = field(default="", repr=False)
    #: the token's variable
    token_name: str = ""

    @property
    def origin(self) -> tuple[str, str, int | None]:
        """Scheme, host and port that the token may be sent to."""
        parts = urlsplit(self.api)
        return parts.scheme, (parts.hostname or "").lower(), parts.port


def site() -> Site:
    """The forge in ``SPARK_BUILD_FORGE`` (a host, or an API's URL), else GitHub.

    Raises:
        UsageError: the setting is not a URL, has credentials, or is not https.
    """
    text = settings.FORGE.value.strip() or GITHUB_API
    parts, host = _parts(settings.FORGE.name, text if "://" in text else f"https://{text}")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UsageError(
            "SPARK_BUILD_FORGE is not a host or the address of an API",
            hint="SPARK_BUILD_FORGE=https://github.example.com",
        )
    if parts.username or parts.password:
        raise UsageError(
            "SPARK_BUILD_FORGE contains a user name or password",
            hint=f"put the token into {settings.FORGE_TOKEN.name}",
        )
    if parts.scheme == "http" and not _LOOPBACK.fullmatch(host):
        raise UsageError(f"SPARK_BUILD_FORGE: {host} uses http; only https is allowed")
    if host in (GITHUB_HOST, urlsplit(GITHUB_API).hostname):
        api, host = GITHUB_API, GITHUB_HOST
    else:
        api = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or _ENTERPRISE_PATH}"
    name, token = _token(api, host)
    return Site(api=api, host=host, token=token, token_name=name)


def _parts(name: str, address: str) -> tuple[SplitResult, str]:
    """The parts of the address in a variable, and its host.

    Raises:
        UsageError: it is not an address.
    """
    try:
        parts = urlsplit(address)
        _ = parts.port  # checked when it is read
        return parts, (parts.hostname or "").lower()
    except ValueError as error:
        raise UsageError(f"{name} is not the address of an API: {error}") from None


def _token(api: str, host: str) -> tuple[str, str]:
    variables = [settings.FORGE_TOKEN]
    if api == GITHUB_API or host in _hosts_of_github_tokens():
        variables += _GITHUB_TOKENS
    for variable in variables:
        name, value = variable.name, variable.value.strip()
        if value and not (value.isascii() and value.isprintable()):
            raise UsageError(f"{name} has characters that are not allowed in a token")
        if value:
            return name, value
    return "", ""


def _hosts_of_github_tokens() -> set[str]:
    """Hosts for which GITHUB_TOKEN and GH_TOKEN are valid, according to the environment."""
    named = settings.GITHUB_API_URL.value
    _, host = _parts(settings.GITHUB_API_URL.name, named)
    return {host, settings.GH_HOST.value.lower()} - {""}


# ---------------------------------------------------------------------------------------- requests

#: Statuses that may mean a rate limit.
_LIMITED = frozenset({403, 429})
#: Longest wait for a rate limit in seconds; a longer one is an error.
_SHORT_WAIT = 5.0
_NO_FORGE = "check the network, then run the same command again; locked pull requests need none"
_MAX_REDIRECTS = 5
#: Size limit of a response in JSON: a comparison lists up to 300 files with their patches.
_MAX_BYTES = 32 << 20
#: A count of seconds in a header; a longer one is none.
_SECONDS = re.compile("[0-9]{1,10}")
_REDIRECTS = (301, 302, 303, 307, 308)
_UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class ForgeMissing(RemoteError):
    """The forge reports that it does not exist, or that access is not allowed."""


class ForgeTooLarge(RemoteError):
    """The forge refuses a diff of this size."""


class _Refusal(msgspec.Struct):
    message: str


@dataclass(frozen=True)
class _Answer:
    status_code: int
    headers: requests.structures.CaseInsensitiveDict[str]
    body: bytes


class ForgeClient:
    """Sends GET requests to the API of one forge."""

    def __init__(
        self,
        site: Site,
        session: requests.Session | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        from builder.common.net import Session

        self.site = site
        self._session = session or Session()
        policy = policy or RetryPolicy()
        self._policy = replace(policy, retried=policy.retried - _LIMITED)
        self._session.auth = lambda request: request  # else requests takes a login from ~/.netrc

    def get(self, path: str, accept: str, subject: str, limit: int = _MAX_BYTES) -> bytes:
        """The body of a response; ``subject`` describes the request in messages.

        More than ``limit`` bytes are refused.

        Raises:
            ForgeMissing: 404, 410 or 422: it does not exist, or the token has no access.
            ForgeTooLarge: 406: the diff is larger than the forge allows.
            NoAnswer: there was no response.
            RemoteError: any other failure, rate limits included.
        """
        waited = False
        while True:
            answer = self._follow(f"{self.site.api}{path}", accept, subject, limit)
            if answer.status_code == 200:
                return answer.body
            delay = _limited(answer)
            if delay is None:
                raise self._refusal(answer, subject)
            if waited or delay > _SHORT_WAIT:
                raise self._rate_limit(delay, subject)
            waited = True
            self._policy.pause(delay)

    def _follow(self, url: str, accept: str, subject: str, limit: int) -> _Answer:
        for _ in range(_MAX_REDIRECTS + 1):
            answer = self._try(url, accept, subject, limit)
            target = answer.headers.get("Location")
            if answer.status_code not in _REDIRECTS or not target:
                return answer
            following = resolved(url, target, "a redirect of the forge")
            if urlsplit(following).scheme != urlsplit(url).scheme != "http":
                raise RemoteError(f"{subject}: {self.site.host} redirects away from https")
            url = following
        raise RemoteError(f"{subject}: {self.site.host} redirects more than {_MAX_REDIRECTS} times")

    def _try(self, url: str, accept: str, subject: str, limit: int) -> _Answer:
        """Request one URL, with retries after server errors."""
        from builder.common.net import final_answer

        return final_answer(
            lambda: self._ask(url, accept, subject, limit),
            url,
            Retries(host_of(url), subject, self._policy, hint=_NO_FORGE),
            lambda answer: f"answered {answer.status_code}{self._message(answer)}",
        )

    def _ask(self, url: str, accept: str, subject: str, limit: int) -> _Answer:
        parts = urlsplit(url)
        headers = {"Accept": accept, "User-Agent": "spark-build"}
        if (parts.scheme, (parts.hostname or "").lower(), parts.port) == self.site.origin:
            headers["X-GitHub-Api-Version"] = "2022-11-28"
            if self.site.token:
                headers["Authorization"] = f"Bearer {self.site.token}"
        console.detail(f"forge: GET {parts.hostname}{parts.path}")
        with self._session.get(url, headers=headers, allow_redirects=False, stream=True) as answer:
            body = _bounded(answer, subject, limit)
            return _Answer(answer.status_code, answer.headers, body)

    # -- what went wrong

    def _refusal(self, answer: _Answer, subject: str) -> RemoteError:
        host, status = self.site.host, answer.status_code
        message = self._message(answer)
        if status == 401:
            name = self.site.token_name
            which = f"the token in {name}" if name else "a request without a token"
            return RemoteError(f"{subject}: {host} refuses {which}{message}")
        if status in (404, 410, 422):
            token = f"the token in {self.site.token_name}" if self.site.token else "no token"
            return ForgeMissing(
                f"{subject} is not on {host}: it does not exist, or it is private and {token} "
                f"has no access{message}",
                hint="check the number; for a private repository set SPARK_BUILD_FORGE_TOKEN",
            )
        if status == 406:
            return ForgeTooLarge(
                f"{subject}: the diff is larger than {host} can return{message}",
                hint="clone the repository and name the clone: --forge-clone DIR",
            )
        return RemoteError(
            f"{subject}: {host} answered {status}{message}", hint="run the same command again later"
        )

    def _message(self, answer: _Answer) -> str:
        """The server's message, shortened, with the token removed."""
        try:
            text = msgspec.json.decode(answer.body, type=_Refusal).message
        except (ValueError, RecursionError):
            return ""
        if self.site.token:
            text = text.replace(self.site.token, "***")
        return f" ({_UNREADABLE.sub(' ', text)[:200]})"

    def _rate_limit(self, delay: float, subject: str) -> RemoteError:
        until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() + delay))
        hint = f"run the same command after {until}"
        if not self.site.token:
            hint += ", or set SPARK_BUILD_FORGE_TOKEN, which has its own limit"
        return RemoteError(
            f"{subject}: the rate limit of {self.site.host} is used up; try again after {until} "
            f"(in {max(1, round(delay / 60))} min)",
            hint=hint,
        )


def _bounded(response: requests.Response, subject: str, limit: int) -> bytes:
    """The whole body, up to a size limit.

    Raises:
        RemoteError: it is too large, or compressed although that was not asked for.
    """
    coding = response.headers.get("Content-Encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise RemoteError(
            f"{subject}: the answer is compressed ({coding[:40]!r}), which was not asked for",
            hint="check the proxy and the server that SPARK_BUILD_FORGE names",
        )
    pieces: list[bytes] = []
    size = 0
    for piece in response.iter_content(1 << 18):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise RemoteError(f"{subject}: the answer is larger than {limit >> 20} MiB")
    return b"".join(pieces)


def _limited(answer: _Answer) -> float | None:
    """Seconds until a rate limit ends; None if the response is not a rate limit.

    The rules are GitHub's: Retry-After first, then X-RateLimit-Reset (seconds since the epoch, by
    the server's clock), else at least a minute.
    """
    if answer.status_code not in _LIMITED:
        return None
    headers = answer.headers
    after = asked_wait(headers)
    if after is not None:
        return after
    reset = headers.get("X-RateLimit-Reset", "")
    if headers.get("X-RateLimit-Remaining") == "0" and _SECONDS.fullmatch(reset):
        return max(1.0, int(reset) - server_time(headers))
    if answer.status_code == 429 or b"rate limit" in answer.body.lower():
        return 60.0
    return None


# ------------------------------------------------------------------------------------------ GitHub

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


class _Merge(Struct):
    merged_at: _Moment | None = None


class _Issue(Struct):
    title: str
    state: Literal["open", "closed"]
    updated_at: _Moment | None = None
    pull_request: _Merge | None = None


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

    def thread(self, repository: str, number: int) -> Thread:
        # https://docs.github.com/en/rest/issues/issues#get-an-issue: pull requests too
        path, subject = f"/repos/{repository}/issues/{number}", f"{repository}#{number}"
        issue = self._read(path, subject, _Issue)
        merged = issue.pull_request is not None and issue.pull_request.merged_at
        return Thread(
            title=issue.title,
            state=MERGED if merged else issue.state,
            updated=(issue.updated_at or "")[:10],
        )

    def commits_of(self, repository: str, path: str, old: str, new: str) -> list[tuple[str, str]]:
        # https://docs.github.com/en/rest/commits/commits#list-commits
        place = f"/repos/{repository}/commits?path={quote(path)}&per_page="
        subject = f"{repository}: {path}"
        last = self._read(f"{place}1&sha={quote(old)}", subject, list[_Commit])
        end = last[0].sha if last else ""
        commits = self._read(f"{place}30&sha={quote(new)}", subject, list[_Commit])
        until = itertools.takewhile(lambda commit: commit.sha != end, commits)
        return [(one.sha, one.commit.message.partition("\n")[0]) for one in until]

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
        commit = self._read(f"/repos/{repository}/commits/{name}", subject, _Commit)
        if not commit.sha.startswith(name):
            raise self._odd(subject, f"it is about commit {commit.sha}")
        return commit

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


# --------------------------------------------------------------------------------------------- git
#
# A clone's configuration can name programs: ``gpg.program``, ``core.sshCommand``,
# ``core.fsmonitor``, filters, hooks and more.  So it is not read.  git works in an empty
# repository of ours, whose refs and objects are those of the clone.  It knows no remote, and so
# fetches nothing, even if objects are missing.

#: Seconds for one command; ``git rev-list`` of Linux's history takes about 30.
_PATIENCE = 300.0
#: Size limit of an answer other than a diff or an archive: a million commits.
_MAX_ANSWER = 64 << 20
_MAX_MESSAGE = 2000
_HEAD = re.compile(r"ref: refs/[\x21-\x7e]+|[0-9a-f]{40}(?:[0-9a-f]{24})?")
#: What the clone's own repository has besides objects; linked, so that nothing is copied.
_LINKED = ("refs", "packed-refs", "shallow", "reftable")
#: Where git looks for a repository needs the user's ``safe.directory``, and so the user's
#: configuration.  It runs nothing that a configuration names; these make sure of it.
_WARY = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-pager")


@dataclass(frozen=True)
class Answer:
    """An answer of git: its exit status, and its standard output."""

    code: int
    data: bytes

    @property
    def text(self) -> str:
        """The output as text, without line ends at its end."""
        return self.data.decode("utf-8", "replace").strip()


class Git:
    """git, on the refs and objects of one clone."""

    def __init__(self, folder: Path, patience: float = _PATIENCE) -> None:
        """Find the repository of a folder; ``patience`` is the limit of one command in seconds.

        Raises:
            RemoteError: git finds none, or cannot read it.
            UsageError: git is not installed.
        """
        self.folder = folder
        self._patience = patience
        words = ("rev-parse", "--path-format=absolute", "--git-dir", "--git-common-dir")
        outside = _without_git(os.environ) | {"GIT_ALLOW_PROTOCOL": "none"}
        command = ["git", *_WARY, "-C", str(folder), *words, "--show-object-format"]
        answer = self._checked(command, outside, "rev-parse", (0,), _MAX_ANSWER)
        places = answer.data.decode("utf-8", "surrogateescape").splitlines()
        if len(places) != 3:
            raise RemoteError(f"git rev-parse in {folder}: unexpected answer {answer.text[:200]!r}")
        self._own, self._common, form = Path(places[0]), Path(places[1]), places[2]
        # removed when this object is
        self._scratch = tempfile.TemporaryDirectory(prefix="spark-build-clone-")
        self._imitate(Path(self._scratch.name), form)

    def _imitate(self, place: Path, form: str) -> None:
        """A repository of our own with the clone's refs."""
        extensions = [f"objectFormat = {form}"] if form != "sha1" else []
        for name in _LINKED:
            if (self._common / name).exists():
                (place / name).symlink_to(self._common / name)
        if (self._common / "reftable").is_dir():
            extensions.append("refStorage = reftable")
        settings = ["[core]", f"repositoryformatversion = {int(bool(extensions))}", "bare = true"]
        settings += ["[extensions]", *extensions] if extensions else []
        (place / "config").write_text("\n".join([*settings, ""]), "utf-8")
        head = self._own / "HEAD"
        text = ""
        if head.is_file():
            with head.open("rb") as stream:
                text = stream.read(4096).decode("ascii", "replace").strip()
        known = _HEAD.fullmatch(text)
        (place / "HEAD").write_text(f"{text if known else 'ref: refs/heads/none'}\n", "utf-8")

    @property
    def remote_urls(self) -> list[str]:
        """The addresses of the clone's remotes, from its configuration file alone."""
        file = self._common / "config"
        if not file.is_file():
            return []
        words = (
            "--file",
            str(file),
            "--no-includes",
            "--null",
            "--get-regexp",
            r"^remote\..*\.url$",
        )
        listed = self.run("config", *words, codes=(0, 1))
        return [row.partition("\n")[2] for row in listed.text.split("\0")]

    def run(self, *words: str, codes: Collection[int] = (0,), limit: int = _MAX_ANSWER) -> Answer:
        """Run a command of git; exit statuses other than ``codes`` are errors, signals too.

        Raises:
            RemoteError: it failed, took too long, or printed more than ``limit`` bytes.
        """
        place = self._scratch.name
        env = _without_git(os.environ) | {
            "GIT_DIR": place,
            "GIT_OBJECT_DIRECTORY": str(self._common / "objects"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "HOME": place,
            "XDG_CONFIG_HOME": place,
        }
        settings = ["-c", "core.quotePath=false"]
        if words[0] == "diff-tree":  # else git 2.43 to 2.45 reads the attributes of HEAD
            settings += ["-c", "attr.tree=refs/none"]
        command = ["git", "--no-pager", *settings, *words]
        return self._checked(command, env, words[0], codes, limit)

    def _checked(
        self,
        command: list[str],
        env: Mapping[str, str],
        name: str,
        codes: Collection[int],
        limit: int,
    ) -> Answer:
        subject = f"git {name} in {self.folder}"
        late = threading.Event()
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            except FileNotFoundError:
                raise UsageError("git is not installed, and --forge-clone needs it") from None

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(self._patience, stop)
            timer.start()
            try:
                assert process.stdout is not None
                data = process.stdout.read(limit + 1)
                process.stdout.close()
                if len(data) > limit:
                    raise RemoteError(f"{subject}: the answer is larger than {limit >> 20} MiB")
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.wait()
            errors.seek(0)
            message = errors.read(_MAX_MESSAGE).decode("utf-8", "replace").strip()
        if late.is_set():
            raise RemoteError(f"{subject}: no answer after {self._patience:.0f} s")
        if code not in codes:
            raise self._failure(subject, code, message)
        return Answer(code, data)

    def _failure(self, subject: str, code: int, message: str) -> RemoteError:
        how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
        place = shlex.quote(str(self.folder))
        hint = f"git -C {place} fsck"
        if hasattr(self, "_common") and any((self._common / "objects").glob("pack/*.promisor")):
            message += "; it is a partial clone, and spark-build fetches nothing for it"
            hint = f"git -C {place} fetch --refetch --no-filter origin"
        return RemoteError(f"{subject}: {how}: {message}", hint=hint)


def _without_git(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for git, without those that change what it does."""
    ours = {name: value for name, value in variables.items() if not name.startswith("GIT_")}
    return ours | {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}


# ------------------------------------------------------------------------------------ local clones

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
        base = self._git.run("merge-base", target, commit, codes=(0, 1)).text
        if not base:
            raise ForgeMissing(
                f"{repository}: {commit[:12]} has no common ancestor with its branch"
            )
        return base

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

    def thread(self, repository: str, number: int) -> Thread:
        owner, _, name = repository.partition("/")
        try:
            facts = self.facts(PullRef(owner=owner, repo=name, number=number))
        except ForgeMissing:
            return Thread()
        merged = facts.state == MERGED
        return Thread(title=facts.title, state=MERGED if merged else "", updated=facts.merged_at)

    def commits_of(self, repository: str, path: str, old: str, new: str) -> list[tuple[str, str]]:
        for name in (old, new):
            self._commit(name, f"{repository}@{name}")
        words = ("log", "--format=%H %s", f"{old}..{new}", "--", path)
        lines = self._git.run(*words).text.splitlines()
        return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]

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
            branch = self._resolved(name)
            if branch:
                return branch
        raise UsageError(f"--forge-clone {self.folder}: the clone has no commit")

    def _commit(self, name: str, subject: str) -> str:
        """The full name of a commit in the clone."""
        full = self._resolved(name)
        if not full:
            raise ForgeMissing(
                f"{subject} is not in the clone {self.folder}",
                hint=f"git -C {shlex.quote(str(self.folder))} fetch --all",
            )
        return full

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
    versions = []
    for tag in tags:
        try:
            version = Version(tag.removeprefix("v"))
        except ValueError:  # InvalidVersion, or a number of thousands of digits
            continue
        if not version.is_prerelease:
            versions.append(str(version))
    return versions


# ---------------------------------------------------------------------------- pins and their diffs

_NOT_OF_A_TITLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+")
_PAGE = re.compile("https?://[!-~]+")


class Forges:
    """The configured forge, and local clones to use instead of it."""

    def __init__(self, clones: Sequence[str] = ()) -> None:
        named = settings.FORGE_CLONE.value
        self._words = [*clones, *(word for word in named.split(os.pathsep) if word)]
        self._clones: list[Clone] | None = None
        self._api: Forge | None = None

    def for_repository(self, repository: str) -> tuple[Forge, str]:
        """The forge or clone for a repository, and its name.

        Raises:
            UsageError: a setting is wrong.
        """

        if self._clones is None:
            pairs = [word.rpartition("=") for word in self._words]
            self._clones = [Clone(_folder(place), name) for name, _, place in pairs]
        for clone in self._clones:
            if clone.holds(repository):
                return clone, f"clone {clone.folder}"
        if self._api is None:
            self._api = GitHub(ForgeClient(site()))
        return self._api, site().host


def _folder(place: str) -> Path:
    try:
        return Path(place).expanduser()
    except RuntimeError:
        raise UsageError(f"--forge-clone {place}: there is no such user") from None


@dataclass(frozen=True)
class PullStore:
    """Turns references into pins, and pins into diffs."""

    forges: Forges

    # -- pinning

    def resolve(self, ref: PullRef) -> Pin:
        """Pin the current state of a reference, with a request to the forge.

        If the forge does not respond, the last pin is used, with a notice.

        Raises:
            RemoteError: it does not exist, or the forge does not respond and nothing is cached.
            SparkBuildError: the change is empty (exit 3).
            UsageError: the page is on another host than the configured forge.
        """
        host = site().host
        if ref.host and ref.host != host:
            raise UsageError(
                f"{ref} is on {ref.host}, but the configured forge is {host}",
                hint=f"SPARK_BUILD_FORGE={ref.host}",
            )
        forge, _ = self.forges.for_repository(ref.repository)
        known = self._cached_pin(host, ref)
        try:
            facts = forge.facts(ref)
        except NoAnswer as error:
            if known is None:
                raise
            console.warn(f"{error}; using the cached state of {ref}, at {known.short}")
            return known
        if facts.notice:
            console.warn(f"{ref}: {facts.notice}")
        pin = self._pin(host, ref, facts, forge, known)
        self._keep(host, ref, pin)
        return pin

    def _pin(
        self, host: str, ref: PullRef, facts: PullFacts, forge: Forge, known: Pin | None
    ) -> Pin:
        repository = facts.repository
        if known and known.commit == facts.commit and self._diff_file(known.sha256).is_file():
            base, date, sha256, size = known.base, known.date, known.sha256, known.size
        else:
            base = facts.target
            if facts.number:
                base = forge.merge_base(repository, facts.target, facts.commit)
            console.say(f"  fetching {ref} at {facts.commit[:12]}")
            data = self._fetched(forge, str(ref), repository, base, facts.commit)
            if not data:
                raise SparkBuildError(
                    f"{ref} is empty: from {base[:12]} to {facts.commit[:12]} its diff is empty",
                    Exit.NOTHING_TO_DO,
                    hint="leave it out, or name a commit of it: OWNER/REPO#NUMBER@COMMIT",
                )
            date, sha256, size = forge.date(repository, facts.commit), sha256_hex(data), len(data)
            write_atomically(self._diff_file(sha256), data)
        released = known.release if known and known.merge_commit == facts.merge_commit else ""
        if facts.merge_commit and not released:
            versions = forge.releases_with(repository, facts.merge_commit)
            released = versions[0] if versions else ""
        try:  # by the rules that a lock is read with
            pin = Pin(
                request=str(ref),
                forge=host,
                repository=repository,
                number=facts.number,
                base=base,
                commit=facts.commit,
                date=date,
                sha256=sha256,
                size=size,
                title=_NOT_OF_A_TITLE.sub(" ", facts.title).strip()[:200],
                state=facts.state,
                url=facts.url if _PAGE.fullmatch(facts.url) else "",  # no javascript: in a link
                merge_commit=facts.merge_commit,
                merged_at=facts.merged_at,
                superseded_by=facts.superseded_by,
                release=released,
            )
            return read(plain(pin), Pin)
        except ValueError as error:
            raise RemoteError(f"{ref}: {host} gave what cannot be pinned: {error}") from None

    @staticmethod
    def _fetched(forge: Forge, request: str, repository: str, base: str, commit: str) -> bytes:
        """A diff in normal form.

        Raises:
            RemoteError: the forge has none, or gives what is not a diff.
        """
        data = forge.diff(repository, base, commit)
        try:
            return normalise(data)
        except UsageError as error:
            short = f"{base[:12]}...{commit[:12]}"
            another = "" if isinstance(forge, Clone) else "--forge-clone DIR"
            raise RemoteError(
                f"{request}: the diff of {short}: {error}", error.hint or another
            ) from None

    def released(self, pin: Pin, release: str) -> Pin:
        """The pin with the first release that has the change; cached."""
        completed = structs.replace(pin, release=release)
        write_atomically(self._pin_file(pin.forge, pin.request), _json(completed))
        return completed

    # -- diffs

    def diff(self, pin: Pin) -> bytes:
        """The diff of a pin in normal form: from the cache, else from the forge.

        Raises:
            RemoteError: the forge no longer has the commit, or returns a different diff.
        """
        with contextlib.suppress(OSError):
            data = self._diff_file(pin.sha256).read_bytes()
            if sha256_hex(data) == pin.sha256:
                return data
        forge, name = self.forges.for_repository(pin.repository)
        console.say(f"  fetching {pin.request} at {pin.short}, as pinned")
        try:
            data = self._fetched(forge, pin.request, pin.repository, pin.base, pin.commit)
        except ForgeMissing as error:
            raise RemoteError(
                f"{pin.request} is pinned at {pin.commit}, which {name} no longer has "
                "(force-pushed or deleted), and its diff is not in the cache; update the pin, or "
                "name a clone that still has the commit with --forge-clone",
                hint="spark-build lock --upgrade",
            ) from error
        if sha256_hex(data) != pin.sha256:
            raise RemoteError(
                f"{pin.request}: the diff of {pin.base[:12]}...{pin.short} has sha256 "
                f"{sha256_hex(data)}, pinned is {pin.sha256}; do not build from it: find the cause "
                "before you update the pin",
                hint="spark-build lock --upgrade",
            )
        write_atomically(self._diff_file(pin.sha256), data)
        return data

    # -- the cache

    @staticmethod
    def _diff_file(sha256: str) -> Path:
        return cache_dir() / "forge" / "diffs" / f"{sha256}.diff"

    @staticmethod
    def _pin_file(host: str, request: str) -> Path:
        return cache_dir() / "forge" / "pins" / f"{sha256_hex(f'{host} {request}'.encode())}.json"

    def _cached_pin(self, host: str, ref: PullRef) -> Pin | None:
        with contextlib.suppress(OSError, ValueError, RecursionError, UsageError):
            return read_pin(json.loads(self._pin_file(host, str(ref)).read_bytes()), "cache")
        return None

    def _keep(self, host: str, ref: PullRef, pin: Pin) -> None:
        write_atomically(self._pin_file(host, str(ref)), _json(pin))


def _json(pin: Pin) -> bytes:
    return json.dumps(plain(pin), indent=1, sort_keys=True).encode() + b"\n"
