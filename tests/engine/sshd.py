"""A real SSH server on the loopback interface, whose users find one Docker Engine and no other."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from . import cache, debs
from .cache import MachineError, call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SUITE = "bookworm"
PACKAGES = ("openssh-server", "openssh-client", "libwrap0")
START_TIMEOUT = 20.0


@dataclass(frozen=True)
class Server:
    """A running server: what a client needs to reach it."""

    config: Path
    log: Path

    @property
    def ssh(self) -> str:
        """The client with its configuration, as ``--ssh`` takes it.  The host is ``node``."""
        return f"{_program('ssh')} -F {self.config}"

    def run(self, *words: str) -> str:
        """Run a command there."""
        return call(*self.ssh.split(), "node", *words)


def _tree() -> Path:
    make = partial(debs.unpack, SUITE, PACKAGES)
    return (
        cache.entry(f"ssh/{cache.key(SUITE, PACKAGES)}", lambda work: make(work / "tree")) / "tree"
    )


def _program(name: str) -> str:
    found = shutil.which(name)
    if found and name != "sshd":
        return found
    place = "usr/sbin" if name == "sshd" else "usr/bin"
    return str(_tree() / place / name)


def _libraries() -> str:
    return ":".join(str(path) for path in sorted((_tree() / "usr" / "lib").glob("*-linux-gnu")))


@contextmanager
def serve(work: Path, env: Mapping[str, str]) -> Iterator[Server]:
    """Serve until the block ends; commands find ``env``."""
    port = _free_port()
    for name in ("host_key", "user_key"):
        call(_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", work / name)
    (work / "authorized").write_text((work / "user_key.pub").read_text())
    (work / "known").write_text(f"[127.0.0.1]:{port} {(work / 'host_key.pub').read_text()}")
    _write_configs(work, port, env)
    process = subprocess.Popen(
        # its own view of /etc/passwd and /run, because it wants a user and a folder of its own
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "sh",
         _program("sshd"), str(work)],
        env={**os.environ, "LD_LIBRARY_PATH": _libraries()},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = Server(work / "client_config", work / "log")
    try:
        _await(process, port, server)
        yield server
    finally:
        process.terminate()
        process.wait(10)


#: ``sshd`` gives up its rights to a user of that name, and looks for its folder.
_START = """
set -e
cp /etc/passwd "$2/passwd"
grep -q ^sshd: "$2/passwd" || echo 'sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin' >>"$2/passwd"
mount --bind "$2/passwd" /etc/passwd
mkdir -p "$2/run/sshd" && chmod 755 "$2/run/sshd"
mount --bind "$2/run" /run
exec "$1" -D -e -f "$2/server_config" -E "$2/log"
"""


def _write_configs(work: Path, port: int, env: Mapping[str, str]) -> None:
    # one line: of several only the first counts
    setting = " ".join(f'"{name}={value}"' for name, value in env.items())
    (work / "server_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {work}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {work}/authorized\nStrictModes no\nPermitRootLogin yes\n"
        f"PasswordAuthentication no\nUsePAM no\nAllowTcpForwarding yes\nSetEnv {setting}\n"
    )
    (work / "client_config").write_text(
        f"Host node node-2 node-3\nHostName 127.0.0.1\nPort {port}\nUser root\n"
        f"IdentityFile {work}/user_key\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {work}/known\nStrictHostKeyChecking yes\n"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await(process: subprocess.Popen[bytes], port: int, server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    said = server.log.read_text() if server.log.exists() else "nothing"
    raise MachineError(f"sshd did not answer; it said: {said[-2000:]}")
