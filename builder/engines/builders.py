"""Builders: BuildKit outside the local Docker Engine.

A builder is one that ``docker buildx ls`` lists (drivers docker-container, kubernetes, remote), or
the address of a BuildKit daemon.  An address becomes a builder in a temporary configuration, so
that nothing remains after a run.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder import settings
from builder.errors import EngineError, UsageError, did_you_mean
from builder.registry.reference import parse_reference
from builder.util.console import console
from builder.util.hints import reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Addresses that buildx's remote driver dials (its documentation, "Remote driver", and the
#: connection helpers of BuildKit's client).
SCHEMES = ("tcp", "unix", "docker-container", "podman-container", "kube-pod", "ssh")
#: The builder of the Docker Engine in use.
ENGINE = "default"
#: First BuildKit whose Dockerfile frontend supports ``COPY --link``.
_LINK_SINCE = (0, 11)
#: Seconds; buildx itself gives up after 20.
_PATIENCE = 120
_DIALLING = 10
#: Cache types of BuildKit, and the attributes that they need (its documentation,
#: "Export cache").
_CACHES = {
    "registry": "ref",
    "local": "",
    "inline": "",
    "gha": "",
    "s3": "bucket",
    "azblob": "account_url",
}
_LOCAL = {"from": "src", "to": "dest"}


@dataclass(frozen=True)
class Builder:
    """A builder that responded."""

    name: str
    #: the name that the user gave
    said: str
    driver: str
    links: bool
    env: Mapping[str, str] = field(default_factory=dict)


def engine_environment() -> dict[str, str]:
    """Environment in which buildx uses the same Docker Engine as the SDK, whatever the context."""
    return {} if settings.DOCKER_HOST.value else {"DOCKER_CONTEXT": ENGINE}


def check_name(text: str) -> str:
    """Check the value of ``--builder`` and return it.

    Raises:
        UsageError: it is neither a name nor an address that buildx can dial.
    """
    scheme, colon, rest = text.partition("://")
    if not colon and re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", text):
        return text
    if colon and scheme in SCHEMES and rest and not re.search(r"[\s,]", rest):
        return text
    meant = did_you_mean(scheme, SCHEMES) if colon else ""
    raise UsageError(
        f"--builder {text!r} is neither the name of a builder nor an address{meant}",
        hint=f"docker buildx ls shows names; addresses begin with {', '.join(SCHEMES)} and ://",
    )


@contextlib.contextmanager
def reached(docker: str, said: str) -> Iterator[Builder]:
    """The builder with that name or address, after it responded.

    Raises:
        EngineError: it does not exist, does not respond, or is another Docker Engine.
        UsageError: it is not a valid name or address.
    """
    check_name(said)
    if "://" not in said:
        yield _ask(docker, said, said, {})
        return
    _dial(said)
    with tempfile.TemporaryDirectory(prefix="spark-build-builder-") as folder:
        env = {"BUILDX_CONFIG": folder}
        words = ("create", "--name", "spark-build", "--driver", "remote", said)
        done = _buildx(docker, words, env)
        if done.returncode:
            raise _no_answer(said, done.stderr)
        yield _ask(docker, "spark-build", said, env)


def _dial(address: str) -> None:
    """Check for a listener first: buildx would retry for 20 seconds without a reason."""
    scheme, _, rest = address.partition("://")
    try:
        if scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_DIALLING)
                probe.connect(rest)
        elif scheme == "tcp":
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _DIALLING).close()
    except (OSError, ValueError) as error:
        raise _no_answer(address, f"no answer: {reason(error)}") from None


def _ask(docker: str, name: str, said: str, env: Mapping[str, str]) -> Builder:
    console.detail(f"asking builder {said}")
    done = _buildx(docker, ("inspect", "--bootstrap", name), env)
    facts = dict(re.findall(r"^([A-Z][\w ]*?):\s+(.*?)\s*$", done.stdout, re.MULTILINE))
    if done.returncode or facts.get("Status", "running") != "running":
        raise _no_answer(said, done.stderr or facts.get("Error", "") or done.stdout)
    driver = facts.get("Driver", "")
    if driver == "docker" and name != ENGINE:
        where = f"$(docker context inspect {name} -f '{{{{.Endpoints.docker.Host}}}}')"
        raise EngineError(
            f"builder {said} is a Docker Engine (driver docker, endpoint "
            f"{facts.get('Endpoint', '')}), but not the one that spark-build uses",
            hint=f"use that engine without --builder: DOCKER_HOST={where}",
        )
    told = facts.get("BuildKit version") or facts.get("Buildkit") or ""
    version = re.match(r"v?(\d+)\.(\d+)", told)
    known = (int(version[1]), int(version[2])) if version else (0, 0)
    links = known == (0, 0) or known >= _LINK_SINCE  # distributions build it without its version
    return Builder(name=name, said=said, driver=driver, links=links, env=dict(env))


def _no_answer(said: str, words: str) -> EngineError:
    lines = [line for line in words.strip().splitlines() if line.strip(" -")]
    shown = "\n  ".join(line.removeprefix("ERROR: ") for line in lines[-4:]) or "no output"
    return EngineError(f"builder {said} cannot be used:\n  {shown}", hint="docker buildx ls")


def _buildx(
    docker: str, words: Sequence[str], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [docker, "buildx", *words]
    console.detail(f"+ {' '.join(command)}")
    try:
        return subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {_PATIENCE} s")


def cache_words(options: Sequence[str], direction: str) -> list[str]:
    """The arguments of buildx for ``--cache-from`` and ``--cache-to``.

    A plain image name is a cache in a registry, written with ``mode=max``.

    Raises:
        UsageError: it is neither an image name nor a BuildKit cache.
    """
    words = []
    for text in options:
        words += [f"--cache-{direction}", _cache(text, direction)]
    return words


def _cache(text: str, direction: str) -> str:
    if "=" not in text:
        try:
            parse_reference(text)
        except UsageError as error:
            raise UsageError(f"--cache-{direction} {text!r}: {error}") from None
        return f"type=registry,ref={text}" + (",mode=max" if direction == "to" else "")
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    kind = pairs.get("type", "")
    if kind not in _CACHES:
        raise UsageError(
            f"--cache-{direction} {text!r}: type is {kind!r}{did_you_mean(kind, _CACHES)}",
            hint=f"HOST/NAME:TAG, or type=...: {', '.join(_CACHES)}",
        )
    wanted = _LOCAL[direction] if kind == "local" else _CACHES[kind]
    if wanted and not pairs.get(wanted):
        raise UsageError(f"--cache-{direction} {text!r} lacks {wanted}=")
    if kind == "registry":
        parse_reference(pairs["ref"])
    return text
