"""bubblewrap for the tests, and a program that says what it can see and do."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

from tests.engine import cache, debs, machine

PACKAGE = "bubblewrap"

#: Prints what it finds as JSON.  Its arguments are a port that listens and paths to write to.
NOSY = """
import json, os, pwd, socket, sys

def tried(what):
    try:
        return f"did: {what()}"
    except Exception as error:
        return type(error).__name__

port, *paths = sys.argv[1:]
print(json.dumps({
    "stdin": sys.stdin.read(),
    "uid": os.getuid(),
    "env": sorted(os.environ),
    "home": os.listdir(os.path.expanduser("~")),
    "network": [name for _, name in socket.if_nameindex()],
    "connect": tried(lambda: socket.create_connection(("127.0.0.1", int(port)), 2)),
    "write": {path: tried(lambda: open(path, "w")) for path in paths},
    "scratch": tried(lambda: open("/tmp/own", "w").close()),
    "kernel": [
        path for at, _, names in os.walk("/proc/sys") for name in names
        if os.access(path := os.path.join(at, name), os.W_OK)
    ],
    "proc": bool(os.statvfs("/proc").f_flag & os.ST_RDONLY),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "root": sorted(os.listdir("/")),
    "etc": sorted(os.listdir("/etc")),
}))
"""


def bring_bubblewrap() -> Path:
    """The folder of ``bwrap``: this machine's, else Debian's, unpacked into the cache.

    Raises:
        MachineError: it is not to be had.
    """
    found = shutil.which("bwrap")
    if found:
        return Path(found).parent
    make = partial(_unpack, machine.TOOL_SUITE)
    return cache.entry(f"tools/{cache.key(PACKAGE, machine.TOOL_SUITE)}-bwrap", make) / "bin"


def _unpack(suite: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = folder / "unpacked"
    debs.unpack(suite, [PACKAGE], unpacked)
    (folder / "bin").mkdir()
    (unpacked / "usr" / "bin" / "bwrap").rename(folder / "bin" / "bwrap")
    shutil.rmtree(unpacked)


def on_path(folder: Path) -> str:
    """PATH with a folder in front."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
