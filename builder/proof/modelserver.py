"""The processes that imported a release and answer questions about models, also of later commands.

A `broker` stands between: it is of this user alone, ends itself when no command asked for a while,
and is found by everything that its answers depend on.  Releases whose files are not trusted, and
run isolated, never come here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: TC003 - msgspec reads annotations
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from msgspec import Meta

from builder import settings
from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import SERVERS, locked
from builder.common.console import console
from builder.common.document import Count, Document, Part
from builder.common.hints import reason
from builder.common.paths import cache_dir
from builder.common.programs import PREFLIGHT
from builder.errors import UsageError
from builder.proof import broker
from builder.proof.installed import made_when
from builder.proof.isolation import SandboxUnavailable
from builder.proof.replies import ProbeReply, reply_of
from builder.proof.sandbox import probe_environment
from builder.proof.variables import own_folders

T = TypeVar("T", bound=ProbeReply)

#: Processes that imported a release and wait for questions; each has about 1 GB.
_MOST = 2
#: The default of ``SPARK_BUILD_SERVER_IDLE``, in minutes.
_IDLE = 10
#: Seconds in which a broker tells its status.
_STATUS = 2.0
#: Bytes of an answer that are read at once.
_CHUNK = 1 << 16


class Process(Part, frozen=True, kw_only=True):
    """A process that imported a release and waits for questions."""

    vllm: str
    pid: Annotated[int, Meta(description="of the process that ends the other one")]
    bytes: Count
    idle: Annotated[float, Meta(description="seconds since the last command")]
    ends_after: Annotated[float, Meta(description="seconds without a command")]
    busy: bool


class Processes(Document, frozen=True, kw_only=True):
    """The processes that wait for questions of later commands."""

    processes: tuple[Process, ...]
    ended: Annotated[int, Meta(description="with --end")] = 0


class Server:
    """A connection to a process that imported a release; without ``name``, to one of its own."""

    def __init__(
        self, python: Path, header: Mapping[str, object], label: str = "", name: str = ""
    ) -> None:
        self._start = (python, header, label)
        self._name = name
        self._old = False
        self._own: subprocess.Popen[bytes] | None = None
        self._socket = self._connected()

    def _connected(self) -> socket.socket:
        """A connection to the process, which is started if it does not run."""
        if self._name:
            try:
                return self._shared()
            except OSError as error:  # a file system without sockets, or another user's folder
                console.warn(f"this process ends with the command: {reason(error)}")
                self._name, self._old = "", False
        ours, theirs = socket.socketpair()
        with theirs:
            self._own = _start(*self._start, first=theirs)
        return ours

    def _shared(self) -> socket.socket:
        """A connection to the process that later commands use, too.

        Raises:
            OSError: a socket for it cannot be made.
        """
        with _folder() as folder, locked(f"{cache_dir()}/{SERVERS}/{self._name}"):
            waiting = _connect(folder, self._name)
            self._old = waiting is not None
            if waiting is not None:
                return waiting
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=folder)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"/proc/self/fd/{folder}/{self._name}")
                listener.listen()
                _start(*self._start, listen=listener, path=cache_dir() / SERVERS / self._name)
            connection = _connect(folder, self._name)
        if connection is None:
            raise OSError(f"nobody listens at {cache_dir() / SERVERS / self._name}")
        return connection

    def ask(self, questions: Sequence[Mapping[str, object]], timeout: float) -> Any:
        """The answers to some questions, as the probe wrote them.

        Raises:
            SandboxUnavailable: it ended, or took longer than ``timeout`` seconds.
        """
        try:
            return _exchange(self._socket, {"questions": list(questions)}, timeout)
        except TimeoutError:
            self.close()
            raise SandboxUnavailable(f"{PREFLIGHT.name} took more than {timeout:.0f} s") from None
        except (OSError, ValueError, RecursionError):
            self.close()
        if self._old:  # it may have ended by itself when it was asked
            self._socket = self._connected()
            self._old = False
            return self.ask(questions, timeout)
        raise SandboxUnavailable(f"{PREFLIGHT.name} ended without a result")

    @property
    def ended(self) -> bool:
        """Whether it can answer no more."""
        if self._socket.fileno() < 0:
            return True
        with contextlib.suppress(OSError):
            self._socket.settimeout(0)
            try:
                return not self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
        return True

    def end(self) -> None:
        """End it, whoever else asks it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"end": True}).encode() + b"\n")
        self.close()

    def close(self) -> None:
        """Leave it: it ends at once if it answers, or is of this command alone; else later."""
        self._socket.close()
        if self._own is not None:
            self._own.wait()
            self._own = None


def _start(
    python: Path, header: Mapping[str, object], label: str, *,
    first: socket.socket | None = None, listen: socket.socket | None = None,
    path: Path | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a broker on a connected or on a bound socket."""
    # the folder of temporary files of a command goes with it
    folder = f"{path}.files" if path else tempfile.mkdtemp(prefix="spark-build-probe-")
    request = {
        "command": [str(python), str(PREFLIGHT.file())], "env": probe_environment(""),
        "own": sorted(own_folders("")),
        "header": header, "label": label, "path": path and str(path),
        "first": first and first.fileno(), "listen": listen and listen.fileno(),
        "linger": idle_seconds() if listen else 0, "folder": folder,
    }  # fmt: skip
    passed = [one.fileno() for one in (first, listen) if one is not None]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(broker.__file__)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=passed, start_new_session=True, cwd="/",
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(json.dumps(request).encode() + b"\n")
    _started.append(process)
    return process


def _exchange(connection: socket.socket, message: Mapping[str, object], timeout: float) -> Any:
    """Send a message, and read its reply.

    Raises:
        TimeoutError: there was none within this many seconds.
        OSError: the other end left.
        ValueError: the reply is not JSON.
    """
    end = time.monotonic() + timeout
    connection.settimeout(timeout)
    connection.sendall(json.dumps(message, sort_keys=True).encode() + b"\n")
    parts: list[bytes] = []
    while not (parts and parts[-1].endswith(b"\n")):
        connection.settimeout(max(0.001, end - time.monotonic()))
        parts.append(connection.recv(_CHUNK))
        if not parts[-1]:
            raise ConnectionResetError
    return json.loads(b"".join(parts))


@contextmanager
def _folder() -> Iterator[int]:
    """The folder of the sockets, opened: it is of this user, and closed to all others.

    Raises:
        OSError: it is not, or cannot be made.
    """
    path = cache_dir() / SERVERS
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        info = os.fstat(folder)
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise PermissionError(f"{path} is open to other users")
        yield folder
    finally:
        os.close(folder)


def _connect(folder: int, name: str) -> socket.socket | None:
    """A connection to a broker of this user; None if it does not run."""
    connection = socket.socket(socket.AF_UNIX)
    try:  # a path of at most 107 bytes, however deep the cache is
        connection.connect(f"/proc/self/fd/{folder}/{name}")
        if broker.user_of(connection) == os.getuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None


def idle_seconds() -> float:
    """Seconds without a command after which a process ends; 0: with its command.

    Raises:
        UsageError: the variable is no number of minutes.
    """
    text = settings.SERVER_IDLE.value.strip() or str(_IDLE)
    if not re.fullmatch(r"\d{1,4}", text):
        name = settings.SERVER_IDLE.name
        raise UsageError(f"{name}={text!r} is not a number of minutes", hint=f"{name}=10")
    return int(text) * 60.0


def running() -> list[Process]:
    """The processes that wait for questions of later commands."""
    return [process for _, process in _running()]


def _running() -> list[tuple[str, Process]]:
    processes: list[tuple[str, Process]] = []
    if not (cache_dir() / SERVERS).is_dir():
        return processes
    with contextlib.suppress(OSError), _folder() as folder:  # else nothing was started there
        for name in sorted(path.name for path in (cache_dir() / SERVERS).iterdir()):
            connection = _connect(folder, name)
            if connection is None:
                continue
            with connection, contextlib.suppress(OSError, ValueError):
                told = _exchange(connection, {"status": True}, _STATUS)
                process = Process(
                    vllm=told["label"], pid=told["pid"], bytes=told["bytes"], idle=told["idle"],
                    ends_after=told["ends_after"], busy=told["busy"],
                )  # fmt: skip
                processes.append((name, process))
    return processes


def end(name: str = "") -> int:
    """End the processes that wait, or one of them; how many there were."""
    ended = 0
    for one, _ in _running():
        if name in ("", one):
            with _folder() as folder:
                connection = _connect(folder, one)
            if connection is not None:
                with connection, contextlib.suppress(OSError, ValueError):
                    _exchange(connection, {"end": True}, _STATUS)
                ended += 1
    return ended


def _make_room(name: str) -> bool:
    """End the processes that waited longest, so that one more may start; whether there is room."""
    others = [(one, process) for one, process in _running() if one != name]
    idle = sorted((p.idle, one) for one, p in others if not p.busy)
    while len(others) >= _MOST and idle:
        _, longest = idle.pop()
        end(longest)
        others = [one for one in others if one[0] != longest]
    return len(others) < _MOST


_started: list[subprocess.Popen[bytes]] = []
_servers: OrderedDict[str, Server] = OrderedDict()


@atexit.register
def close_servers(left: int = 0) -> None:
    """Leave the processes of releases, except for those that were asked last."""
    while len(_servers) > left:
        _servers.popitem(last=False)[1].close()
    for process in _started:
        process.poll()
        # one that outlives this command is no child to wait for
        process.returncode = 0 if process.returncode is None else process.returncode


def ask_server(
    python: Path, header: Mapping[str, object], questions: Sequence[Mapping[str, object]],
    form: type[T], *, label: str, timeout: float, spoils: Callable[[T], bool] = lambda _: False,
) -> T:  # fmt: skip
    """Ask the process of a release, which is started for the first question.

    After a reply that ``spoils`` it, the process ends.

    Raises:
        SandboxUnavailable: it gave no answer within this many seconds.
        MalformedReply: the process answers something else.
    """
    program = sha256_hex(Path(broker.__file__).read_bytes())
    folders = [python.parents[1], *map(Path, cast("list[str]", header.get("paths", [])))]
    # one that imported from a folder before it was made again is not asked
    made = [made_when(folder) for folder in folders]
    parts = [str(python), str(PREFLIGHT.file()), program, header, made, probe_environment("")]
    key = sha256_hex(canonical_json(parts))[:32]
    server = _servers.pop(key, None)
    if server is None or server.ended:
        close_servers(_MOST - 1)
        shared = idle_seconds() > 0 and _make_room(key)
        server = Server(python, header, label, key if shared else "")
    _servers[key] = server
    reply = reply_of(server.ask(questions, timeout), form)
    if spoils(reply):
        _servers.pop(key).end()
    return reply
