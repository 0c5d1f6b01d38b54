"""What runtimes unpack: umoci, and containerd with its overlay and its plain snapshotter.

Three ways in which Go programs put the layers of an image together.  Each image of a layout goes to
each of them; the answer is the tree that a container would see, or that it was refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    #: What is at a path: its kind, its permissions, and the sha256 of a file or target of a link.
    Node = tuple[str, int, str]
    Tree = dict[str, Node]

UMOCI, OVERLAY, PLAIN = "umoci", "containerd-overlayfs", "containerd-native"
RUNTIMES = (UMOCI, OVERLAY, PLAIN)
#: In place of the mode of a file that has several names.
UNSAID = -1
SUITE, PACKAGES = "trixie", ("umoci", "containerd")
_START_TIMEOUT = 30.0
_CONFIG = """\
version = 2
root = "{root}/root"
state = "{root}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{root}/socket"
"""


def programs() -> Path:
    """The folder of ``umoci``, ``containerd`` and ``ctr``, out of Debian's packages."""
    from . import cache, debs

    def make(folder: Path) -> None:
        debs.unpack(SUITE, PACKAGES, folder / "files")

    return cache.entry(f"runtimes/{cache.key([SUITE, *PACKAGES])}", make) / "files" / "usr" / "bin"


def unpacked(layout: Path, names: list[str], work: Path) -> dict[str, dict[str, Tree | str]]:
    """For each image of a layout, by runtime: the tree, or what the runtime said against it.

    It runs in a mount namespace of its own: nothing stays mounted however it ends.
    """
    work.mkdir()
    request = json.dumps([str(programs()), str(layout), names, str(work)])
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__]
    done = subprocess.run(command, input=request, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the runtimes did not answer:\n{done.stderr[-4000:]}")
    answers: dict[str, dict[str, Tree | str]] = {name: {} for name in names}
    for line in done.stdout.splitlines():
        name, runtime, found = json.loads(line)
        if isinstance(found, dict):
            found = {path: tuple(node) for path, node in found.items()}
        answers[name][runtime] = found
    shutil.rmtree(work, ignore_errors=True)
    return answers


# ------------------------------------------------------------------------- in the other namespace


def _tree(root: Path) -> Tree:
    """Every path below a folder."""
    found: Tree = {}
    pending = [os.fsencode(root)]
    while pending:
        folder = pending.pop()
        for entry in os.scandir(folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # overlay lists its whiteouts in a folder of one layer only
                continue
            name = os.fsdecode(os.path.relpath(entry.path, os.fsencode(root)))
            found[name] = _node(entry.path, status)
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)
    return found


def _node(path: bytes, status: os.stat_result) -> Node:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return "dir", mode, ""
    if stat.S_ISLNK(status.st_mode):
        return "symlink", 0, os.fsdecode(os.readlink(path))  # noqa: PTH115 - the name is bytes
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as stream:  # noqa: PTH123 - the name is bytes
            # containerd gives the mode of the link's own header, umoci that of the file's
            mode = UNSAID if status.st_nlink > 1 else mode
            return "file", mode, hashlib.file_digest(stream, "sha256").hexdigest()
    return "other", mode, ""


def _umoci(bin_folder: Path, layout: Path, name: str, work: Path) -> Tree | str:
    target = work / f"umoci-{name}"
    words = [str(bin_folder / "umoci"), "raw", "unpack", "--image", f"{layout}:{name}", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    try:
        return _tree(target) if done.returncode == 0 else done.stderr[-300:]
    finally:
        shutil.rmtree(target, ignore_errors=True)


@contextlib.contextmanager
def _containerd(bin_folder: Path, work: Path) -> Iterator[list[str]]:
    """A private containerd; gives the words that begin a command to it."""
    config = work / "containerd.toml"
    config.write_text(_CONFIG.format(root=work))
    path = f"{bin_folder}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
    environment = {**os.environ, "PATH": path, "CONTAINERD_DISABLE_PIGZ": "1"}
    log = (work / "containerd.log").open("w")
    words = [str(bin_folder / "containerd"), "--config", str(config)]
    daemon = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    client = [str(bin_folder / "ctr"), "--address", str(work / "socket")]
    try:
        began = time.monotonic()
        while subprocess.run([*client, "version"], capture_output=True, check=False).returncode:
            if daemon.poll() is not None or time.monotonic() - began > _START_TIMEOUT:
                raise RuntimeError((work / "containerd.log").read_text()[-2000:])
            time.sleep(0.05)
        yield client
    finally:
        daemon.terminate()
        daemon.wait()
        log.close()


def _imported(client: list[str], layout: Path, work: Path) -> None:
    """Give containerd all the images, without unpacking them."""
    archive = work / "images.tar"
    subprocess.run(["tar", "-C", layout, "-cf", archive, "."], check=True)
    words = [*client, "images", "import", "--local", "--no-unpack", "--base-name", "case"]
    words += ["--all-platforms", str(archive)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    archive.unlink()


def _mounted(client: list[str], name: str, snapshotter: str, work: Path) -> Tree | str:
    target = work / f"{snapshotter}-{name}"
    target.mkdir()
    words = [*client, "images", "mount", "--rw", "--snapshotter", snapshotter]
    words += ["--platform", "linux/arm64", f"case:{name}", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        return done.stderr[-300:]
    try:
        return _tree(target)
    finally:
        subprocess.run(["umount", target], check=True)


def _main() -> None:
    bin_folder, layout, names, work = json.load(sys.stdin)
    bin_folder, layout, work = Path(bin_folder), Path(layout), Path(work)

    def answer(name: str, runtime: str, found: Tree | str) -> None:
        print(json.dumps([name, runtime, found]), flush=True)

    with _containerd(bin_folder, work) as client:
        _imported(client, layout, work)
        for name in names:
            answer(name, UMOCI, _umoci(bin_folder, layout, name, work))
            answer(name, OVERLAY, _mounted(client, name, "overlayfs", work))
            answer(name, PLAIN, _mounted(client, name, "native", work))


if __name__ == "__main__":
    _main()
