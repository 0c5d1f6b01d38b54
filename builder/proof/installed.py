"""Folders that code is run from: made whole, held against RECORD, and made again where they differ.

Installers lay the files of several distributions at the same time, so chance or the alphabet
decides whose file a shared path gets.  Here the last distribution of the list always wins, and a
folder is taken only if every file has the sha256 that the RECORDs give.  A file in it, the seal,
then has the size, time and sha256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from builder.applier.receipts import parse_record
from builder.applier.trees import distribution_of
from builder.common.cache import locked
from builder.common.console import console
from builder.common.files import write_atomically
from builder.common.hints import CACHE, os_hint
from builder.common.leftovers import making
from builder.common.paths import cache_dir
from builder.errors import UsageError
from builder.proof.isolation import SandboxUnavailable, call, install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

#: File in a folder: path -> size, time of change in ns, and sha256 of each file, as it was checked.
SEAL = "spark-build-seal"
#: File in a folder that must be made again: why.
DAMAGE = "spark-build-damage"
#: Folders of the cache with answers that code in such a folder gave.
ANSWERS = ("dispatch", "preflight", "codegen", "numbers", "launches")
#: A file's digest, by path in a folder.
Digests = dict[str, str]


# ------------------------------------------------------------------------------------- installation


def install(
    python: Path, packages: Sequence[str], folder: Path, site: str = "", *, into: bool = True
) -> None:
    """Install exactly these packages, ``name==version``: into a folder, or for its interpreter.

    ``site`` is where they are in the folder.  Of two that share a path the later one in the list
    has it.

    Raises:
        SandboxUnavailable: the installer fails, or leaves other files than the RECORDs say.
    """
    place = folder / site
    call(install_command(python, packages, place if into else None))
    for fresh in (False, True):  # what the installer has in its cache may be damaged
        for package, paths in _misplaced(place, packages).items():
            with making(place) as alone:
                call(install_command(python, [package], alone, fresh=fresh))
                for path in paths:
                    _replace(alone / path, place / path)
    if wrong := differs(place, recorded(place, packages, programs=not into)):
        raise SandboxUnavailable(f"the installer left files that do not match RECORD: {wrong}")


def _misplaced(site: Path, packages: Sequence[str]) -> dict[str, list[str]]:
    """Paths with other contents than their last package has, by that package."""
    wrong: dict[str, list[str]] = {}
    for path, (package, digest) in _claims(site, packages).items():
        if ".." not in path and digest_of(site / path) != digest:
            wrong.setdefault(package, []).append(path)
    return wrong


def _replace(source: Path, target: Path) -> None:
    """Move a file; the one in its place may be linked with the installer's cache."""
    with suppress(FileNotFoundError):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def recorded(site: Path, packages: Sequence[str], *, programs: bool = False) -> Digests:
    """The sha256 of each file by the RECORDs of some packages, the last of which decides.

    ``programs`` are outside of ``site``; of a folder that is no environment, pip names them where
    they are not.
    """
    claims = _claims(site, packages)
    return {path: sha for path, (_, sha) in claims.items() if programs or ".." not in path}


def _claims(site: Path, packages: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Path -> the last package that has it, and the sha256 there; "" for a missing RECORD."""
    found: dict[str, str] = {}
    for info in sorted(site.glob("*.dist-info")):
        if dist := distribution_of(info.name):
            found[canonicalize_name(dist.name)] = info.name
    claims: dict[str, tuple[str, str]] = {}
    for package in packages:
        name = canonicalize_name(package.partition("==")[0])
        record = f"{found.get(name, f'{name}.dist-info')}/RECORD"
        try:
            data = (site / record).read_bytes()
            rows = parse_record(data)
        except (OSError, ValueError):
            claims[record] = (package, "")
            continue
        claims |= {row.path: (package, row.sha256) for row in rows if row.sha256}
    return claims


# --------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True, kw_only=True)
class MadeFolder:
    """A folder in the cache that is made once, and what its files must be."""

    folder: Path
    #: makes it, below another name
    make: Callable[[Path], None]
    #: the sha256 of its files, as somebody else gives them
    expected: Callable[[Path], Mapping[str, str]]
    #: folders of the cache with answers that depend on it
    answers: tuple[str, ...] = ANSWERS

    def ensure(self) -> Path:
        """Make it if it is missing, or if it is not what it must be.

        Raises:
            SparkBuildError: it cannot be made.
        """
        if is_sealed(self.folder):  # the lock is for those that make it
            return self.folder
        with locked(str(self.folder)):
            if not is_sealed(self.folder) and not self._is_sound():
                with making(self.folder) as partial, making(self.folder) as old:
                    self.make(partial)
                    seal(partial, self.expected(partial))
                    with suppress(FileNotFoundError):
                        self.folder.rename(old)
                    partial.rename(self.folder)
        return self.folder

    def _is_sound(self) -> bool:
        """Whether it is there, and every file is right; it is sealed then."""
        if not self.folder.exists():
            return False
        expected = self.expected(self.folder)
        if wrong := _noted_damage(self.folder) or differs(self.folder, expected):
            console.warn(f"{self.folder.name} in the cache is damaged, and made again: {wrong}")
            forget(self.answers)
            return False
        with suppress(UsageError):  # a cache that cannot be written is checked each time
            seal(self.folder, expected)
        return True


def _noted_damage(folder: Path) -> str:
    with suppress(OSError):
        return (folder / DAMAGE).read_text("utf-8")
    return ""


def forget(answers: Iterable[str]) -> None:
    """Remove all cached answers of these kinds: nothing tells which are of a damaged folder."""
    for name in answers:
        with suppress(OSError):
            for file in (cache_dir() / name).iterdir():
                if file.is_file():
                    file.unlink(missing_ok=True)


def is_sealed(folder: Path) -> bool:
    """Whether all its files were checked."""
    return (folder / SEAL).is_file()


def made_when(folder: Path) -> int:
    """When it was sealed, in ns; 0 without a seal."""
    try:
        return (folder / SEAL).stat().st_mtime_ns
    except OSError:
        return 0


def seal(folder: Path, known: Mapping[str, str]) -> None:
    """Note each file with its sha256; ``known`` has those that were just checked.

    Raises:
        UsageError: it cannot be written or read.
    """
    rows = {}
    try:
        for path in _files(folder):
            info = (folder / path).stat()
            digest = known.get(path) or digest_of(folder / path)
            rows[path] = [info.st_size, info.st_mtime_ns, digest]
    except OSError as error:
        raise UsageError(
            f"cannot read {folder}: {error.strerror}", hint=os_hint(error, CACHE)
        ) from error
    write_atomically(folder / SEAL, json.dumps(rows).encode())


def differs(folder: Path, expected: Mapping[str, str]) -> str:
    """The first file that has not its sha256, in words; "" if all have."""
    for path, digest in expected.items():
        if digest_of(folder / path) != digest:
            there = (folder / path).exists()
            return f"{path} {'is not what RECORD says' if there else 'is missing'}"
    return ""


def damage(folders: Iterable[Path], *, whole: bool) -> str:
    """What is wrong with folders that were sealed; a damaged one is no longer.

    By the size and time of each file, and with ``whole`` also by its sha256.
    """
    for folder in folders:
        try:
            rows = json.loads((folder / SEAL).read_bytes())
            wrong = _changed(folder, rows, whole=whole)
        except (OSError, ValueError, TypeError, AttributeError):
            wrong = f"{SEAL} cannot be read" if folder.exists() else "it is gone"
        if wrong:
            note_damage(folder, wrong)
            return f"{folder.name}: {wrong}"
        console.detail(f"checked: {folder.name} is as it was made")
    return ""


def note_damage(folder: Path, why: str) -> None:
    """Let a folder be made again when it is used next."""
    with suppress(OSError):
        (folder / SEAL).unlink(missing_ok=True)
        (folder / DAMAGE).write_text(why, "utf-8")


def _changed(folder: Path, rows: Mapping[str, Sequence[object]], *, whole: bool) -> str:
    for path, (size, changed, digest) in rows.items():
        try:
            info = (folder / path).stat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        same = (info.st_size, info.st_mtime_ns) == (size, changed)
        if (whole or not same) and digest_of(folder / path) != digest:
            return f"{path} has changed since it was made"
    return ""


def _files(folder: Path) -> Iterator[str]:
    """The regular files of a folder, without what Python compiled and the seal."""
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(top, name)
            if not path.is_symlink() and name not in (SEAL, READ):
                yield path.relative_to(folder).as_posix()


def digest_of(path: Path) -> str:
    """The sha256 of a file, or what a RECORD never gives if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


# --------------------------------------------------------------------------- what Python compiled
#
# CPython does not look whether a compiled file was written as a whole.  On a full disk it leaves
# the beginning, and the next import ends with "EOFError: marshal data too short".

_LOADS = """
import marshal, sys
for line in sys.stdin:
    try:
        with open(line[:-1], "rb") as stream:
            marshal.loads(stream.read()[16:])
    except OSError:
        pass
    except Exception:
        print(line, end="", flush=True)
"""


#: File in a folder whose time is when the compiled files in it were read last.
READ = "spark-build-read"


def drop_broken_compiled(python: Path, folders: Iterable[Path], *, every: bool = True) -> int:
    """Remove compiled files that the interpreter cannot read; returns how many there were.

    Without ``every``, those are passed over that were read before.  It runs in a process of its
    own: damaged bytes may crash it.
    """
    began = time.time_ns()
    found = {
        folder: list(_compiled(folder, 0 if every else _read_when(folder))) for folder in folders
    }
    compiled = [path for paths in found.values() for path in paths]
    if not compiled:
        return 0
    text = "".join(f"{path}\n" for path in compiled)
    words = [str(python), "-I", "-S", "-c", _LOADS]
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    except OSError:  # whoever runs the interpreter says why
        return 0
    # where it crashed, nobody knows which of them is damaged
    broken = compiled if done.returncode else [Path(line) for line in done.stdout.splitlines()]
    for path in broken:
        console.detail(f"removed: Python cannot read {path}")
        with suppress(OSError):
            path.unlink()
    for folder in found:
        with suppress(OSError):
            (folder / READ).touch()
            os.utime(folder / READ, ns=(began, began))
    return len(broken)


def _read_when(folder: Path) -> int:
    with suppress(OSError):
        return (folder / READ).stat().st_mtime_ns
    return 0


def _compiled(folder: Path, since: int) -> Iterator[Path]:
    """The compiled files of this interpreter that were written or linked since then."""
    end = f".{sys.implementation.cache_tag}.pyc"
    for path in folder.rglob(f"__pycache__/*{end}"):
        with suppress(OSError):
            if path.stat().st_ctime_ns >= since:
                yield path
