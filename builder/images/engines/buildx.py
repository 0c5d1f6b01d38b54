"""The docker client and its builders: which of them respond, and how one build runs.

A builder is one that ``docker buildx ls`` lists (drivers docker-container, kubernetes, remote), or
the address of a BuildKit daemon.  An address becomes a builder in a temporary configuration, so
that nothing remains after a run.

``--progress=rawjson`` (buildx 0.13) is a stream of documents with ``vertexes`` and ``logs``; it
alone shows that a layer above a new one came from the cache.  Older clients print lines in which
such a layer looks new.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import settings
from builder.common.console import console
from builder.common.hints import reason
from builder.errors import EngineError, UsageError, did_you_mean
from builder.images.registry.reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


#: First engine whose built-in BuildKit supports ``COPY --link`` (BuildKit 0.11); older clients
#: include their own BuildKit.
LINK_SINCE = 23


@dataclass(frozen=True)
class Cli:
    """A docker client that can drive BuildKit, and its command."""

    binary: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    #: version of buildx; None for an older client that does not use it
    buildx: tuple[int, int] | None = None


def find_cli() -> Cli | None:
    """The first ``docker`` on PATH that can build with BuildKit.

    Several clients may be installed, and the first may lack buildx, so each is tried.
    """
    named = settings.DOCKER.value
    places = os.environ.get("PATH", "").split(os.pathsep)
    binaries = [named] if named else [str(Path(p) / "docker") for p in places if p]
    for binary in binaries:
        if not os.access(binary, os.X_OK):
            continue
        version_output = _output([binary, "buildx", "version"])
        if version_output is not None:
            version = re.search(r"\bv?(\d+)\.(\d+)\.", version_output)
            known = (int(version[1]), int(version[2])) if version else (0, 0)
            command = (binary, "buildx", "build", "--provenance=false")
            return Cli(binary, command, {}, known)
        major = (_output([binary, "version", "--format", "{{.Client.Version}}"]) or "").split(".")[
            0
        ]
        if major.isdigit() and 18 <= int(major) < LINK_SINCE:  # BuildKit is inside these
            return Cli(binary, (binary, "build"), {"DOCKER_BUILDKIT": "1"})
    return None


def _output(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode and command[-1] == "version" else done.stdout


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
    given: str
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
def reached(docker: str, address: str) -> Iterator[Builder]:
    """The builder with that name or address, after it responded.

    Raises:
        EngineError: it does not exist, does not respond, or is another Docker Engine.
        UsageError: it is not a valid name or address.
    """
    check_name(address)
    if "://" not in address:
        yield _ask_builder(docker, address, address, {})
        return
    _dial(address)
    with tempfile.TemporaryDirectory(prefix="spark-build-builder-") as folder:
        env = {"BUILDX_CONFIG": folder}
        words = ("create", "--name", "spark-build", "--driver", "remote", address)
        done = _buildx(docker, words, env)
        if done.returncode:
            raise _no_answer(address, done.stderr)
        yield _ask_builder(docker, "spark-build", address, env)


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


def _ask_builder(docker: str, name: str, address: str, env: Mapping[str, str]) -> Builder:
    console.detail(f"asking builder {address}")
    done = _buildx(docker, ("inspect", "--bootstrap", name), env)
    facts = dict(re.findall(r"^([A-Z][\w ]*?):\s+(.*?)\s*$", done.stdout, re.MULTILINE))
    if done.returncode or facts.get("Status", "running") != "running":
        raise _no_answer(address, done.stderr or facts.get("Error", "") or done.stdout)
    driver = facts.get("Driver", "")
    if driver == "docker" and name != ENGINE:
        where = f"$(docker context inspect {name} -f '{{{{.Endpoints.docker.Host}}}}')"
        raise EngineError(
            f"builder {address} is a Docker Engine (driver docker, endpoint "
            f"{facts.get('Endpoint', '')}), but not the one that spark-build uses",
            hint=f"use that engine without --builder: DOCKER_HOST={where}",
        )
    told = facts.get("BuildKit version") or facts.get("Buildkit") or ""
    version = re.match(r"v?(\d+)\.(\d+)", told)
    known = (int(version[1]), int(version[2])) if version else (0, 0)
    links = known == (0, 0) or known >= _LINK_SINCE  # distributions build it without its version
    return Builder(name=name, given=address, driver=driver, links=links, env=dict(env))


def _no_answer(builder: str, words: str) -> EngineError:
    lines = [line for line in words.strip().splitlines() if line.strip(" -")]
    shown = "\n  ".join(line.removeprefix("ERROR: ") for line in lines[-4:]) or "no output"
    return EngineError(f"builder {builder} cannot be used:\n  {shown}", hint="docker buildx ls")


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


#: ``[3/9] COPY --link FOLDER/ /``; BuildKit calls the step that adds a linked layer LINK COPY.
_COPY = re.compile(r"\[(?:\S+ +)?\d+/\d+\] COPY (?:--link )?(\S+)/ /")
_LINE = re.compile(r"#(\d+) (.*)")
#: ``#7 0.412 what a command printed``
_PRINTED = re.compile(r"\d+\.\d+ (.*)")


@dataclass
class Progress:
    """The outcome of a build."""

    #: folder of a layer -> whether it came from the cache
    cached: dict[str, bool] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    #: the output of the steps' commands
    logs: list[str] = field(default_factory=list)

    @property
    def tail(self) -> str:
        """The last lines of output, for an error message."""
        return "\n  ".join(self.lines[-40:])


def read_progress(text: str) -> Progress:
    """Parse the output in either form; text between the documents is kept."""
    progress = Progress()
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] == "{" and (at == 0 or text[at - 1] in "\n}"):
            try:
                value, at = decoder.raw_decode(text, at)
            except ValueError:
                pass
            else:
                _document(value, progress)
                continue
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip():
            progress.lines.append(text[at:end])
        at = end + 1
    _plain(progress)
    return progress


def _document(value: dict[str, Any], progress: Progress) -> None:
    for vertex in value.get("vertexes") or ():
        name = str(vertex.get("name", ""))
        folder = _folder(name)
        done = vertex.get("completed") or vertex.get("cached")
        if folder and done:
            progress.cached[folder] = bool(vertex.get("cached")) or progress.cached.get(
                folder, False
            )
        if vertex.get("completed"):
            progress.lines.append(f"{name}{' (cached)' if vertex.get('cached') else ''}")
        if vertex.get("error"):
            progress.lines.append(f"{name}: {vertex['error']}")
    for log in value.get("logs") or ():
        data = base64.b64decode(log.get("data") or "")
        lines = data.decode("utf-8", "replace").splitlines()
        progress.lines += lines
        progress.logs += lines
    for warning in value.get("warnings") or ():
        data = base64.b64decode(warning.get("short") or "")
        progress.lines.append(data.decode("utf-8", "replace"))


def _folder(name: str) -> str:
    match = _COPY.fullmatch(name)
    return match[1] if match else ""


def _plain(progress: Progress) -> None:
    folders: dict[str, str] = {}
    for line in progress.lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        if printed := _PRINTED.fullmatch(match[2]):
            progress.logs.append(printed[1])
        if folder := _folder(match[2]):
            folders[match[1]] = folder
            progress.cached.setdefault(folder, False)
        elif match[2] == "CACHED" and match[1] in folders:
            progress.cached[folders[match[1]]] = True


#: First buildx that can print its progress as JSON.
_DOCUMENTS_SINCE = (0, 13)


@dataclass(frozen=True)
class BuildOutput:
    """A finished build."""

    status: int
    progress: Progress
    output: str


def run_build(cli: Cli, words: Sequence[str], env: Mapping[str, str]) -> BuildOutput:
    """Run one build without network; the last of ``words`` is its context."""
    documents = (cli.buildx or (0, 0)) >= _DOCUMENTS_SINCE
    command = [*cli.command, f"--progress={'rawjson' if documents else 'plain'}"]
    command += ["--network=none", *words]
    console.detail(f"+ {' '.join(command)}")
    process = subprocess.run(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    progress = read_progress(process.stdout)
    for line in progress.lines:
        console.detail(line)
    return BuildOutput(process.returncode, progress, process.stdout)
