"""Traps: files, folders and an address of this machine, with who touches one noticed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import socket
import struct
from pathlib import Path
from typing import Self

#: Opened, read, changed, made, removed (inotify of Linux).
_TOUCHED = 0x1 | 0x2 | 0x4 | 0x20 | 0x100 | 0x200
_EVENT = struct.Struct("iIII")
_FOLDER = re.compile(r"DIR|ROOT|HOME|CACHE|FOLDER|BASE|DEST")
_ADDRESS = re.compile(r"URL|ENDPOINT|SERVER|HOST|_IP|REPOSITORY|PROXY|ADDR")


class Traps:
    """A trap for each name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched: dict[int, str] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._events)
        self._server.close()

    def lay(self, names: list[str]) -> dict[str, str]:
        """A value for each name, which is a trap."""
        values = {name: self._trap(name) for name in names}
        self._watch(self.folder)
        return values

    def _trap(self, name: str) -> str:
        if _ADDRESS.search(name):
            return f"http://127.0.0.1:{self._server.getsockname()[1]}/{name}"
        place = self.folder / name
        if _FOLDER.search(name):
            place.mkdir()
            self._watch(place)
        else:
            place.write_text("raise SystemExit('a trap was run')\n")
        return str(place)

    def _watch(self, folder: Path) -> None:
        number = self._libc.inotify_add_watch(self._events, os.fsencode(folder), _TOUCHED)
        assert number > 0, os.strerror(ctypes.get_errno())
        self._watched[number] = folder.name

    def watch_module(self, name: str) -> None:
        """A module of Python's own is a trap, too."""
        spec = importlib.util.find_spec(name)
        assert spec is not None
        for file in (spec.origin, spec.cached):
            if file and Path(file).exists():
                self._watch(Path(file))

    def touched(self) -> set[str]:
        """The names of those that were touched since the last look."""
        found = set()
        try:
            while data := os.read(self._events, 1 << 16):
                at = 0
                while at < len(data):
                    number, _, _, size = _EVENT.unpack_from(data, at)
                    name = data[at + _EVENT.size :][:size].rstrip(b"\0").decode()
                    own = self._watched[number]
                    found.add((name or own) if own == self.folder.name else own)
                    at += _EVENT.size + size
        except BlockingIOError:
            pass
        try:
            self._server.accept()[0].close()
            found.add("the address")
        except BlockingIOError:
            pass
        return found
