"""A Debian for 64-bit Arm in a folder, whose programs an emulator runs.

It is kept in the tests' cache with the environment and the downloads of the last run, so that a
second run costs what the command itself costs.  Mounts live in a namespace of each process.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from functools import partial
from pathlib import Path

from tests.engine import cache, debs
from tests.engine.cache import MachineError, call
from tests.engine.machine import ensure_engine, working_mmdebstrap
from tests.engine.support import host_index

CHECKOUT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
PACKAGES = (
    "bash", "ca-certificates", "coreutils", "dash", "findutils", "grep", "gzip", "libc-bin",
    "libstdc++6", "python3", "python3-venv", "sed", "tar",
)  # fmt: skip
_HANDLERS = Path("/proc/sys/fs/binfmt_misc")
#: Where the checkout is, and what a run writes.
SOURCE, HOME = "/src", "/root"

#: In a mount namespace of its own: the checkout, read-only, /proc, a few devices, shared memory.
_ENTER = """
set -e
mount --bind "$1" "$2/src"
mount -o remount,bind,ro "$2/src"
mount -t proc proc "$2/proc"
for name in null zero random urandom; do
    touch "$2/dev/$name"
    mount --bind "/dev/$name" "$2/dev/$name"
done
mkdir -p "$2/dev/shm"
mount -t tmpfs tmpfs "$2/dev/shm"
root=$2
shift 2
exec chroot "$root" "$@"
"""


def emulator() -> None:
    """Let the kernel run programs for 64-bit Arm.

    Raises:
        MachineError: it cannot be done here, and why.
    """
    if os.uname().machine == "aarch64":
        return
    if os.geteuid() != 0:
        raise MachineError("programs of another processor are registered by root alone")
    if not (_HANDLERS / "register").exists():
        call("mount", "-t", "binfmt_misc", "binfmt_misc", _HANDLERS)
    if not (_HANDLERS / "qemu-aarch64").exists():
        if shutil.which("update-binfmts") is None or shutil.which("qemu-aarch64-static") is None:
            debs.install("binfmt-support", "qemu-user-static")
        call("update-binfmts", "--enable", "qemu-aarch64")


class Debian:
    """The unpacked system; ``run`` runs a command in it."""

    def __init__(self) -> None:
        emulator()
        made = cache.entry(f"arm64/{cache.key([SUITE, *PACKAGES])}", partial(_make))
        self.root = made / "root"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, with the checkout at `SOURCE`, however long that takes.

        An emulated processor takes seconds for what takes a tenth of one natively, and on a busy
        machine any limit is reached; each minute the last line of the command's stderr is shown.
        """
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "PYTHONPYCACHEPREFIX": f"{HOME}/bytecode",
            "SPARK_BUILD_VENV": f"{HOME}/venv",
            "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
            "REQUESTS_CA_BUNDLE": "/etc/ssl/certs/ca-certificates.crt",
            "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt",
            **host_index(),
        }
        enter = ["unshare", "--mount", "--propagation", "private", "bash", "-c", _ENTER, "enter"]
        words = [*enter, str(CHECKOUT), str(self.root), *command]
        process = subprocess.Popen(
            words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with process:
            try:
                out, err = _until_the_end(process)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def _until_the_end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process wrote to stdout and stderr; says each minute that it still runs."""
    while True:
        try:
            return process.communicate(timeout=600)
        except subprocess.TimeoutExpired as late:
            so_far: bytes = late.stderr or b""  # bytes, also where the process's text is asked for
            lines = so_far.decode(errors="replace").strip().splitlines()
            cache.say(f"arm64, emulated: {lines[-1] if lines else 'no message yet'}")


def _make(folder: Path) -> None:
    root, sources = folder / "root", folder / "sources.list"
    sources.write_text(debs.source_line(SUITE))
    cache.say(f"unpacking a Debian {SUITE} for arm64")
    program = working_mmdebstrap(ensure_engine())
    hooks = program.resolve().parents[1] / "share" / "mmdebstrap" / "hooks"
    call(
        "unshare", "--mount", "--propagation", "private",
        program, "--quiet", "--mode=root", "--arch=arm64", "--variant=extract",
        f"--hook-dir={hooks / 'merged-usr'}", f"--include={','.join(PACKAGES)}",
        SUITE, folder / "debian.tar", sources,
    )  # fmt: skip
    root.mkdir()
    call("tar", "-C", root, "--exclude=./dev/*", "-xf", folder / "debian.tar")
    (folder / "debian.tar").unlink()
    for name in ("src", "dev", "proc", "root", "tmp", "etc/ssl/certs"):
        (root / name).mkdir(parents=True, exist_ok=True)
    authorities = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    assert authorities is not None
    shutil.copy(authorities, root / "etc/ssl/certs/ca-certificates.crt")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")  # nothing is configured
    (root / "etc/group").write_text("root:x:0:\n")
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc") / name, root / "etc" / name)
