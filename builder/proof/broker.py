"""Stands between commands and the process that imported a release, and ends when nobody asks.

A program of its own, with the standard library alone, so that it starts at once and stays small:
``python -I -S broker.py < request.json``.  The request::

    {"command": ["python", "probe.pyz"], "env": {...}, "header": {...}, "label": "0.33.0",
     "own": [variables that name the folder below, besides TMPDIR],
     "listen": number of a listening socket, or null, "path": its path, "first": number of a
     connected socket, or null, "folder": where temporary files go, which it removes,
     "linger": seconds without a command after which it ends}

``header`` goes to the command's standard input with the first question.  Each line that it writes
is an answer.  A message on a connection is a line, too: ``{"questions": [...]}`` gets the command's
answer; ``{"status": true}`` gets `Broker.status`; ``{"end": true}`` ends it.  Only processes of the
same user may connect.  It ends, and ends the command, when

- the command ends, or whoever waits for an answer leaves;
- no command is connected, and none was for ``linger`` seconds or memory is short.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Seconds between two looks at the memory.
_LOOK = 5.0
#: The longest message of a command, in bytes: a hundred questions have about 100 kB.
_MOST_BYTES = 16 << 20
#: Memory is short when less than this share of it is available.
_SHORT = 0.1
#: Seconds in which a command must take its answer.
_TAKE = 30.0


def user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end (``SO_PEERCRED`` of Linux)."""
    form = struct.Struct("3i")
    return int(
        form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))[1]
    )


def memory_is_short(share: float = _SHORT) -> bool:
    """Whether less than this share of the machine's memory is available."""
    with Path("/proc/meminfo").open(encoding="ascii") as stream:
        rows = dict(line.split(":", 1) for line in stream)
    total, free = (int(rows[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return free < total * share


class Command:
    """A connection, and what arrived of its next message."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.text = b""
        self.asked = False

    def reply(self, line: bytes) -> None:
        """Send a line; a command that left does not get it."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_TAKE)
            self.connection.sendall(line)
            self.connection.settimeout(None)


class Broker:
    """The process of a release, the commands that are connected, and the one that waits."""

    def __init__(self, request: dict[str, Any]) -> None:
        folder = str(request["folder"])
        self.header: dict[str, Any] | None = request["header"]
        self.label, self.linger = str(request["label"]), float(request["linger"])
        self.path = str(request["path"] or "")
        self.process = subprocess.Popen(
            request["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True, bufsize=0,
            env={**request["env"], **dict.fromkeys(("TMPDIR", *request.get("own", ())), folder)},
        )  # fmt: skip
        self.commands: dict[int, Command] = {}
        self.waiting: list[tuple[Command, list[Any]]] = []
        self.answer = b""
        self.started = self.last = time.monotonic()
        self.ends = False
        self.selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self.selector.register(self.process.stdout, selectors.EVENT_READ, self.read_answer)
        if request["first"] is not None:
            self.add(socket.socket(fileno=request["first"]))
        self.listener: socket.socket | None = None
        if request["listen"] is not None:
            self.listener = socket.socket(fileno=request["listen"])
            self.listener.listen()
            self.selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def run(self) -> None:
        """Serve until nobody needs it."""
        while not self.ends:
            for key, _ in self.selector.select(_LOOK):
                key.data()
            if not self.commands:
                idle = time.monotonic() - self.last
                self.ends |= idle >= self.linger or memory_is_short()

    def add(self, connection: socket.socket) -> None:
        """Take a connection."""
        command = Command(connection)
        self.commands[connection.fileno()] = command
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.read(command))

    def accept(self) -> None:
        """Take the connection of a new command, if it is of the same user."""
        assert self.listener is not None
        connection, _ = self.listener.accept()
        if user_of(connection) == os.getuid():
            self.add(connection)
        else:
            connection.close()

    def read(self, command: Command) -> None:
        """Read what a command sent."""
        try:
            text = command.connection.recv(1 << 16)
        except OSError:
            text = b""
        command.text += text
        if not text or len(command.text) > _MOST_BYTES:
            self.leave(command)
            return
        while b"\n" in command.text and not self.ends:
            line, command.text = command.text.split(b"\n", 1)
            self.take(command, json.loads(line))

    def take(self, command: Command, message: dict[str, Any]) -> None:
        """Do what a message says."""
        if message.get("end"):
            self.ends = True
        elif message.get("status"):
            command.reply(json.dumps(self.status()).encode() + b"\n")
        else:
            command.asked = True
            self.waiting.append((command, message["questions"]))
            if len(self.waiting) == 1:
                self.ask()

    def ask(self) -> None:
        """Give the questions of the first command that waits to the process."""
        line = json.dumps({**(self.header or {}), "questions": self.waiting[0][1]}, sort_keys=True)
        self.header = None
        assert self.process.stdin is not None
        left = memoryview(line.encode() + b"\n")
        try:
            while left:
                left = left[self.process.stdin.write(left) :]
        except OSError:
            self.ends = True

    def read_answer(self) -> None:
        """Read what the process wrote; a whole line is the answer of the first that waits."""
        assert self.process.stdout is not None
        text = os.read(self.process.stdout.fileno(), 1 << 16)
        self.answer += text
        if not text or (self.answer and not self.waiting):
            self.ends = True
        elif self.answer.endswith(b"\n"):
            command, _ = self.waiting.pop(0)
            line, self.answer = self.answer, b""
            command.reply(line)
            if self.waiting:
                self.ask()

    def leave(self, command: Command) -> None:
        """Forget a command; its question would be answered to nobody, for how long nobody knows."""
        self.ends |= bool(self.waiting) and self.waiting[0][0] is command
        self.waiting = [one for one in self.waiting if one[0] is not command]
        self.selector.unregister(command.connection)
        del self.commands[command.connection.fileno()]
        command.connection.close()
        if command.asked:  # whoever asks for the status alone does not keep it
            self.last = time.monotonic()

    def status(self) -> dict[str, Any]:
        """What is told of it: the release, process id, bytes of memory, seconds."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text("ascii").split()[1]
            size = int(pages) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            size = 0
        now = time.monotonic()
        busy = any(command.asked for command in self.commands.values())
        return {
            "label": self.label, "pid": os.getpid(), "bytes": size, "busy": busy,
            "age": now - self.started, "idle": 0.0 if busy else now - self.last,
            "ends_after": self.linger,
        }  # fmt: skip

    def close(self) -> None:
        """End the process with what it started; a new command finds no socket."""
        if self.path:
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
        for one in (self.listener, *(c.connection for c in self.commands.values())):
            if one is not None:
                one.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> int:
    """Read a request from stdin, and serve."""
    request = json.loads(sys.stdin.readline())
    sys.stdin.close()
    shutil.rmtree(request["folder"], ignore_errors=True)  # one that was killed left it
    Path(request["folder"]).mkdir(mode=0o700)
    try:
        broker = Broker(request)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            broker.run()
        finally:
            broker.close()
    finally:
        shutil.rmtree(request["folder"], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
