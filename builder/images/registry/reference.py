"""Parses image references like Docker, and suggests what else a wrong one may mean; access options.

The grammar and its limits are those of the distribution project's ``reference`` package and of the
OCI distribution specification: names of at most 255 characters, tags of at most 128.
"""

from __future__ import annotations

import ipaddress
import re
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.common.hints import instead
from builder.common.reference import Ref, schemes
from builder.common.retry import RetryPolicy
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable


DOCKER_HUB = "docker.io"
#: The host of Docker Hub's registry API.
_DOCKER_HUB_API = "registry-1.docker.io"
_DEFAULT_TAG = "latest"
_NAME_LIMIT = 255

_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IMAGE_ID = re.compile(r"[0-9a-f]{64}")

_FORM = "[HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST]"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A tag, a digest, or both, of one repository on one registry; ``""`` where there is none."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def api_host(self) -> str:
        """Host and port of the registry's API."""
        return _DOCKER_HUB_API if self.host == DOCKER_HUB else self.host

    @property
    def name(self) -> str:
        """Host and repository, without tag and digest."""
        return f"{self.host}/{self.repository}"

    @property
    def identifier(self) -> str:
        """What identifies the manifest in requests: the digest if there is one, else the tag."""
        return self.digest or self.tag

    def at(self, digest: str) -> Reference:
        """The same reference, pinned to a digest."""
        return replace(self, digest=digest)

    def tagged(self, tag: str) -> Reference:
        """The same repository with another tag and no digest.

        Raises:
            UsageError: it is not a tag.
        """
        return replace(self, tag=check_tag(tag), digest="")

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"


def check_tag(tag: str) -> str:
    """Check a tag and return it.

    Raises:
        UsageError: it is not a valid tag.
    """
    if not is_tag(tag):
        raise UsageError(
            f"{tag!r} is not a tag: letters, digits, '_', '.' and '-', at most 128, "
            "and not '.' or '-' first"
        )
    return tag


def wrong_host(text: str) -> str:
    """Why this is not a valid ``HOST[:PORT]``; ``""`` if it is."""
    if not _HOST.fullmatch(text):
        return f"{text!r} is not a host with an optional port"
    port = text.rpartition("]")[2].partition(":")[2]
    return "" if not port or 0 < int(port) < 65536 else f"{port} is not a port"


def is_digest(text: str) -> bool:
    """Whether this is a sha256 digest."""
    return _DIGEST.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Whether this is a valid tag."""
    return _TAG.fullmatch(text) is not None


def is_repository(text: str) -> bool:
    """Whether this is a valid repository name without a host."""
    return len(text) <= _NAME_LIMIT and all(map(_COMPONENT.fullmatch, text.split("/")))


def parse_reference(text: str) -> Reference:
    """Parse an image reference, with or without ``docker://``.

    Raises:
        UsageError: it is not a valid reference.
    """
    rest = text.removeprefix("docker://")
    if not rest or rest != rest.strip() or "://" in rest:
        raise _wrong(text, f"the format is {_FORM}")
    rest, at, digest = rest.partition("@")
    if at and not is_digest(digest):
        raise _wrong(text, "'@' must be followed by 'sha256:' and 64 lower-case hexadecimal digits")
    host, rest = _split_host(text, rest)
    repository, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _wrong(text, f"{tag!r} is not a tag")
    if host == DOCKER_HUB and "/" not in repository:
        if _IMAGE_ID.fullmatch(repository):
            raise _wrong(text, "this is an image ID, not a name in a registry")
        repository = f"library/{repository}"
    _check_repository(text, host, repository)
    if not tag and not digest:
        tag = _DEFAULT_TAG
    return Reference(host=host, repository=repository, tag=tag, digest=digest)


def _split_host(text: str, rest: str) -> tuple[str, str]:
    """The first component is a host if it has a dot, a colon or a capital letter."""
    first, slash, others = rest.partition("/")
    is_host = slash and (
        "." in first or ":" in first or first == "localhost" or first != first.lower()
    )
    if not is_host:
        return DOCKER_HUB, rest
    problem = wrong_host(first)
    if problem:
        raise _wrong(text, problem)
    if first in ("index.docker.io", _DOCKER_HUB_API):
        return DOCKER_HUB, others
    return first, others


def _check_repository(text: str, host: str, repository: str) -> None:
    if repository != repository.lower():
        raise _wrong(text, f"the name {repository!r} must be lower case")
    bad = [part for part in repository.split("/") if not _COMPONENT.fullmatch(part)]
    if bad:
        raise _wrong(text, f"{bad[0]!r} is not valid in a repository name")
    if len(f"{host}/{repository}") > _NAME_LIMIT:
        raise _wrong(text, f"the name is longer than {_NAME_LIMIT} characters")


def _wrong(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 300 else f"{text[:300]}..."
    return UsageError(f"{shown!r} is not an image reference: {why}", hint=f"write {_FORM}")


def is_loopback(host: str) -> bool:
    """Whether ``HOST[:PORT]`` is this machine, where plain HTTP is safe."""
    host = host.rpartition("@")[2]  # "localhost:x@evil.example" is evil.example
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# ------------------------------------------------------------- a folder or a release as a reference


def intended_reference(ref: str) -> str:
    """What users probably mean by an invalid image reference: ``pypi:``, ``oci:``..."""
    if re.fullmatch(r"v?\d+\.\d+(\.\w+)*(\+\w+)?", ref):
        return f"pypi:vllm=={ref.removeprefix('v')}"
    if re.match(r"[A-Za-z][\w.-]*(\[[\w,-]+\])?==\d", ref):
        return f"pypi:{ref}"
    folder = Path(ref)
    if ref.startswith("~") or not folder.is_dir():
        return ""
    if (folder / "index.json").is_file() and (folder / "oci-layout").is_file():
        return f"oci:{ref}"
    places = (folder, *folder.glob("lib/python3*/site-packages"))
    return f"dir:{ref}" if any(any(place.glob("vllm-*.dist-info")) for place in places) else ""


def refuse_wrong_kind(ref: Ref) -> None:
    """Refuse an image reference that is really a release or a folder, or of an unknown kind.

    Raises:
        UsageError: the reference is such a thing; the hint says what was probably meant.
    """
    if ref.has_scheme:
        return
    if probably := intended_reference(ref.text):
        what = "a release" if Ref(probably).kind.is_wheels else "a folder here"
        raise UsageError(
            f"{ref.text!r} is read as an image name, but it is {what}; did you mean {probably!r}?",
            hint=instead(ref.text, probably),
        )
    scheme, colon, rest = ref.text.partition(":")
    if colon and "/" not in scheme and "." not in scheme and "==" in rest:
        raise UsageError(f"unknown kind of base {scheme!r}{did_you_mean(scheme, schemes())}")


# ----------------------------------------------------------------------------------------- options

#: Hosts given on this run's command line.
_asked_for: frozenset[str] = frozenset()


def ask_for_plain_http(hosts: Iterable[str]) -> None:
    """Allow plain HTTP to these hosts in this run, replacing hosts of an earlier call.

    Raises:
        UsageError: a host is not ``HOST[:PORT]``.
    """
    global _asked_for  # noqa: PLW0603 - one command line, one process
    _asked_for = frozenset()
    wanted = frozenset(hosts)
    for host in wanted:
        _check_host(host)
    _asked_for = wanted


def _check_host(host: str) -> None:

    problem = wrong_host(host)
    if problem:
        raise UsageError(
            f"--plain-http {host}: {problem}",
            hint=instead(host, "registry.local:5000"),
        )


@dataclass(frozen=True, kw_only=True)
class Options(RetryPolicy):
    """Timeouts in seconds, and chunk sizes in bytes.

    ``read_timeout`` is the window of ``builder.common.net``; ``deadline`` limits the transfer of a
    blob, including all retries.
    """

    plain_http: frozenset[str] = frozenset()
    connect_timeout: float = 15.0
    read_timeout: float = 60.0
    deadline: float = 6 * 3600.0
    #: between writing a tag that must not move and the last look at it: longer than the request
    #: of another publisher who looked before it was written is on its way
    settle: float = 1.0
    chunk: int = 8 << 20

    @classmethod
    def from_environment(cls) -> Options:
        """The defaults, and the hosts of ``--plain-http`` and ``SPARK_BUILD_PLAIN_HTTP``."""
        hosts = settings.PLAIN_HTTP.value.split(",")
        named = frozenset(host.strip() for host in hosts if host.strip())
        return cls(plain_http=named | _asked_for)


@dataclass
class Traffic:
    """Bytes sent and received over HTTP, headers included, without TLS and TCP overhead."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, requests: int = 0, sent: int = 0, received: int = 0) -> None:
        """Add to the counts; thread-safe."""
        with self._lock:
            self.requests += requests
            self.sent += sent
            self.received += received
