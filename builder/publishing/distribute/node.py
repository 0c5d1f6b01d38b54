"""One machine: its Docker Engine's layers, and pulls over SSH."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A host name or address for SSH, with an optional user; never an option.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*")
_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward")
_OPTIONS = (
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=15",
    "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
#: Timeout in seconds for a node's first response; pulls have only SSH's limits.
_ANSWER = 60.0
_LINES = 6
#: Seconds to wait for the remaining output of a closed connection.
_LAST_WORDS = 5.0

#: Script: print the node's facts, then each image's diff_ids on a line.
_SURVEY = """
docker version --format 'arch {{.Server.Arch}}' || exit 90
df -Pk "$(docker info --format '{{.DockerRootDir}}')" 2>/dev/null | awk 'NR==2 {print "free", $4}'
docker image ls --quiet --no-trunc | sort -u | while read -r id; do
  docker image inspect --format '{{json .RootFS.Layers}}' "$id" 2>/dev/null || true
done
"""
#: Script: pull by digest (the engine reuses and checks layers), tag, remove the tunnel's tag.
#: The last line has the status, because SSH waits for connections that the engine keeps open.
_FETCH = """
from=127.0.0.1:{port}/{repository}
pull() {{
  for wait in 1 3 0; do
    docker pull --quiet "$from@$1" >/dev/null && break
    [ "$wait" = 0 ] && return 91
    sleep "$wait"
  done
  docker tag "$from@$1" "$2" || return 92
  docker image rm "$from@$1" >/dev/null || return 93
}}
fetch() {{
  for part in {parts}; do
    pull "$part" "{partial}:${{part#sha256:}}" || return
  done
  pull {digest} {name} || return
  docker image ls --format '{{{{.Repository}}}}:{{{{.Tag}}}}' {partial} | while read -r part; do
    docker image rm "$part" >/dev/null
  done
  docker image inspect --format '{{{{.Id}}}}' {name} || return 94
}}
fetch
echo "ended $?"
"""
#: Tag prefix of an image's parts on a node during a transfer.
_PARTIAL = "spark-build-partial"
_ENDED = re.compile(r"ended (\d+)")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node's facts: layers by diff_id, and free bytes in the engine's folder (0: unknown)."""

    architecture: str
    layers: frozenset[str]
    free: int


@dataclass(frozen=True)
class Node:
    """A machine reached over SSH.  ``ssh`` is the program with the user's options."""

    host: str
    ssh: tuple[str, ...] = ("ssh",)

    @classmethod
    def parse(cls, host: str, ssh: str) -> Node:
        """Parse a host from the command line.

        Raises:
            UsageError: the host's name could be taken for an option.
        """
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r} is not a host", hint="spark-1, or user@spark-1")
        try:
            words = tuple(shlex.split(ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {ssh!r}: {error}") from None
        if not words:
            raise UsageError("--ssh names no program")
        return cls(host, words)

    def survey(self) -> NodeFacts:
        """Query the node's engine.

        Raises:
            RemoteError: the node does not respond, or has no usable Docker Engine.
        """
        try:
            done = subprocess.run(
                [*self.ssh, *_OPTIONS, self.host, "sh", "-s"],
                input=_SURVEY,
                capture_output=True,
                text=True,
                timeout=_ANSWER,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RemoteError(f"{self.host} did not answer in {_ANSWER:.0f} s") from None
        except OSError as error:
            raise UsageError(f"{self.ssh[0]} cannot be run: {error.strerror}") from None
        if done.returncode:
            raise self.failed(done.returncode, done.stderr)
        return _parse_survey(done.stdout)

    @contextlib.contextmanager
    def tunnel(self, port: int) -> Iterator[Tunnel]:
        """A shell on the node with ``port`` forwarded.

        Raises:
            RemoteError: the node does not respond, or does not allow port forwarding.
        """
        command = [*self.ssh, *_OPTIONS, "-o", "ExitOnForwardFailure=yes", "-o", "LogLevel=INFO"]
        command += ["-R", f"127.0.0.1:0:127.0.0.1:{port}", self.host, "sh", "-s"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            tunnel = Tunnel(self, process)
            try:
                yield tunnel
            finally:
                process.terminate()

    def failed(self, status: int, said: str) -> RemoteError:
        """The error for a failed command on the node, with the end of its output."""
        lines = [line for line in said.splitlines() if line.strip() and "Allocated" not in line]
        words = "\n  ".join(lines[-_LINES:])
        hints = {
            255: f"{shlex.join(self.ssh)} {self.host} docker version; it must not prompt",
            90: f"add the user to the docker group on {self.host}, or start Docker there",
            91: "run the same command again; completed parts are reused",
        }
        return RemoteError(
            f"{self.host}: failed with status {status}:\n  {words}", hint=hints.get(status, "")
        )


class Tunnel:
    """A shell on a node that waits for a script."""

    def __init__(self, node: Node, process: subprocess.Popen[str]) -> None:
        self._node, self._process = node, process
        self._said: list[str] = []
        self._port: int | None = None
        self._ready = threading.Event()
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        self._reader.start()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            match = _ALLOCATED.search(line)
            if match:
                self._port = int(match[1])
                self._ready.set()
            self._said.append(line)
        self._ready.set()

    def fetch(self, repository: str, digest: str, name: str, parts: Sequence[str]) -> str:
        """Let the node's engine pull and tag an image; returns its ID there.

        ``parts`` are digests of images with its lowest layers, to pull first.

        Raises:
            RemoteError: it failed.
        """
        self._ready.wait(_ANSWER)
        if self._port is None:
            self._process.kill()
            self._process.communicate()
            raise self._node.failed(255, "".join(self._said) or "it did not answer")
        script = _FETCH.format(
            port=self._port,
            repository=repository,
            digest=digest,
            name=shlex.quote(name),
            parts=" ".join(parts),
            partial=_PARTIAL,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(script)
            self._process.stdin.close()
        lines: list[str] = []
        for line in self._process.stdout:
            ended = _ENDED.fullmatch(line.strip())
            if ended is None:
                lines.append(line.strip())
            elif ended[1] == "0" and lines:
                return lines[-1]
            else:
                time.sleep(0.2)  # what docker said of it comes on another way
                raise self._node.failed(int(ended[1]), "".join(self._said))
        status = self._process.wait()
        self._reader.join(_LAST_WORDS)
        raise self._node.failed(status, "".join(self._said))


def _parse_survey(output: str) -> NodeFacts:
    layers: set[str] = set()
    architecture, free = "", 0
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "arch":
            architecture = rest
        elif word == "free" and rest.isdigit():
            free = int(rest) * 1024
        with contextlib.suppress(ValueError):
            value: object = json.loads(line)
            layers.update(_strings(value))
    return NodeFacts(architecture=architecture, layers=frozenset(layers), free=free)


def _strings(value: object) -> Sequence[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
