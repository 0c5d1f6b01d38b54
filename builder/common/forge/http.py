"""One GET request to a forge: redirects, rate limits, retries, token."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from builder.common.console import console
from builder.common.net.messages import host_of, resolved
from builder.common.net.retry import Retries, RetryPolicy, final_answer
from builder.errors import RemoteError

if TYPE_CHECKING:
    import requests

    from builder.common.forge.site import Site

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
        from builder.common.net.session import Session

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
    after = headers.get("Retry-After", "")
    if _SECONDS.fullmatch(after):
        return float(after)
    reset = headers.get("X-RateLimit-Reset", "")
    if headers.get("X-RateLimit-Remaining") == "0" and _SECONDS.fullmatch(reset):
        return max(1.0, int(reset) - _server_time(headers.get("Date")))
    if answer.status_code == 429 or b"rate limit" in answer.body.lower():
        return 60.0
    return None


def _server_time(date: str | None) -> float:
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, OverflowError):  # not a date, or one before the year 1
        return time.time()
