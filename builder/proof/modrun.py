"""Runs a mod isolated on a copy of a release's files, and returns what it changed.

Only ``bwrap`` runs it.  The mod sees this machine's ``/usr`` read-only, its own folder, and the
files where an image has its site-packages.  What it writes is in memory.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import packaging
from msgspec import Meta

from builder.applier.values import path_problem
from builder.common.document import Part, read
from builder.common.paths import package_file
from builder.errors import SparkBuildError
from builder.proof.isolation import Bubblewrap, SandboxUnavailable, interpreter_folders

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Where an image has its site-packages.
SITE = "/usr/local/lib/python3.12/dist-packages"
#: Folders that a mod can write to, with their size in bytes; they are in memory.
_WRITABLE: Mapping[str, int] = {
    "/usr/local": 1 << 30,
    "/workspace": 256 << 20,
    "/tmp": 256 << 20,  # noqa: S108 (its own)
    **dict.fromkeys(("/root", "/home", "/etc", "/opt", "/var", "/srv"), 64 << 20),
}
#: Also in memory; what a mod leaves there is not looked at.
_SHARED: Mapping[str, int] = {"/dev/shm": 64 << 20}  # noqa: S108
#: Files of the installation itself, which no layer changes.
METADATA = re.compile(r"[^/]+\.dist-info/|\.spark-build/")
#: Those that say only what was installed; a mod of ours changes them.
_OWN = re.compile(r"^\.spark-build/|^[^/]+\.dist-info/RECORD$")
#: Seconds for the mod, and for the copies around it.
_SECONDS, _AROUND = 120.0, 120.0
_NAME = Annotated[str, Meta(max_length=4096)]


class ModRun(Part, frozen=True, kw_only=True):
    """How a mod ended, and what it changed; as the isolated program says, so it is checked."""

    status: int
    #: why it was ended, or ""
    over: str
    #: the last lines of its output
    tail: tuple[str, ...]
    #: programs that it called and that need the network, with their arguments
    needed: tuple[str, ...]
    #: modules that its own programs asked for, and that are not there or not executed
    lacked: tuple[str, ...]
    #: changed files that are not in site-packages
    outside: tuple[_NAME, ...]
    #: in site-packages: new links, and files that are too large for a layer
    links: tuple[_NAME, ...]
    large: tuple[_NAME, ...]
    #: changed files in base64; None: removed
    files: dict[_NAME, str | None]

    def changes(self) -> dict[str, bytes | None]:
        """The changed files by path below site-packages; None: removed.

        Raises:
            SandboxUnavailable: the answer has no such form.
        """
        try:
            found = {
                path: None if data is None else base64.b64decode(data, validate=True)
                for path, data in self.files.items()
                if not _OWN.search(path)
            }
        except (binascii.Error, ValueError) as error:
            raise SandboxUnavailable(f"the run's answer is malformed: {error}") from None
        for path in found:
            if problem := path_problem(path):
                raise SandboxUnavailable(f"the mod changed {path!r:.100}, which {problem}")
        return found


def run_mod(name: str, mod: Path, tree: Path, site: str = SITE) -> ModRun:
    """Run the mod of a folder on a copy of the files of another, as an image's site-packages.

    Raises:
        SandboxUnavailable: this machine has no ``bwrap``, it does not work here, or the run gives
            no result.
    """
    python = Path(os.path.realpath(sys.executable))
    beside = Path(packaging.__file__).parent  # images have it, and mods compare versions with it
    places = {**_WRITABLE, **_place_of(site)}
    request = {
        "name": name, "mod": str(mod), "tree": str(tree), "site": site, "seconds": _SECONDS,
        "packages": [str(beside)], "writable": list(places),
    }  # fmt: skip
    words = [str(python), "-I", "-", json.dumps(request)]
    source = package_file("probes", "mod_run.py").read_text("utf-8")
    try:
        answer = Bubblewrap(writable={**places, **_SHARED}, user=0).run(
            words, source, [mod, tree, beside, *_folders(python)], _SECONDS + _AROUND
        )
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(
            f"the run of the mod {name} did not end within {_SECONDS + _AROUND:.0f} s"
        ) from None
    except SandboxUnavailable:
        raise
    except (SparkBuildError, OSError) as error:
        raise SandboxUnavailable(
            f"a mod runs only isolated, and bwrap does not run here: {error}",
            hint="install it (on Debian: apt-get install bubblewrap), and run the same command "
            "again",
        ) from None
    try:
        return read(json.loads(answer), ModRun)
    except ValueError as error:
        raise SandboxUnavailable(f"the run's answer is malformed: {error}") from None


def _place_of(site: str) -> dict[str, int]:
    """The folder in memory that holds site-packages.

    Raises:
        SandboxUnavailable: it is among this machine's own files.
    """
    top = "/".join(site.split("/")[: 3 if site.startswith("/usr/local/") else 2])
    if top in ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/dev", "/proc"):
        raise SandboxUnavailable(
            f"the base has its packages in {site}, where an isolated run has this machine's files",
            hint="--base pypi:vllm==VERSION",
        )
    return {top: _WRITABLE["/usr/local"]}


def _folders(python: Path) -> list[Path]:
    """What the interpreter needs of this machine; of ``/usr/local`` without its packages."""
    if not python.is_relative_to("/usr/local"):
        return [path for path in interpreter_folders(python) if path != Path("/usr/local")]
    library = Path(f"/usr/local/lib/python{sys.version_info[0]}.{sys.version_info[1]}")
    parts = [path for path in library.iterdir() if not path.name.endswith("-packages")]
    return [python, *Path("/usr/local/lib").glob("libpython*"), *sorted(parts)]
