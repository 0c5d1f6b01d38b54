"""Runs inside an image under its own interpreter, and lists packages and their files.

Standard library only.  Reads a JSON list of distribution names from ``SPARK_BUILD_TRACKED`` and
prints one JSON object.  Every file of those distributions is hashed, except those of distributions
whose large binaries no layer touches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import stat
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: Files above this size (bytes) are hashed only if a layer may replace them.
LARGE = 8_000_000
HASH_ALL = re.compile(r"^nvidia-cutlass-dsl|^ray$")
#: Where the applier leaves receipts below site-packages.
RECEIPTS = ".spark-build/receipts"
#: The settings that the applier writes for every Python of an environment.
ENV_PTH = "spark_build_env.pth"


def normalize(name: str) -> str:
    """A distribution name in its PEP 503 form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def describe(path: str, hash_all: bool) -> list[Any] | None:
    """``[size, mode, sha256 or null, uid, gid]`` of a regular file, or None."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    digest = None
    if hash_all or info.st_size <= LARGE:
        hasher = hashlib.sha256()
        with open(path, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                hasher.update(block)
        digest = hasher.hexdigest()
    return [info.st_size, stat.S_IMODE(info.st_mode), digest, info.st_uid, info.st_gid]


def top_levels(record: list[str]) -> set[str]:
    """First path components of a distribution's files in site-packages."""
    return {row.split("/")[0] for row in record if row and not row.startswith(("/", ".."))}


class Disk:
    """The file system that this interpreter sees."""

    def files(self, top: str, hash_all: bool) -> Iterator[tuple[str, list[Any]]]:
        """Path and ``[size, mode, sha256, uid, gid]`` of a file, or of every file below a folder.

        Links to files count as files, links to folders below ``top`` are not entered.
        """
        paths = [top] if os.path.isfile(top) else []
        for folder, _, names in os.walk(top):
            paths.extend(os.path.join(folder, name) for name in names)
        for path in paths:
            entry = describe(path, hash_all)
            if entry is not None:
                yield path, entry

    def owner(self, path: str) -> list[int] | None:
        """``[mode, uid, gid]`` of a path's target, or None."""
        try:
            info = os.stat(path)
        except OSError:
            return None
        return [stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid]

    def realpath(self, path: str) -> str:
        """The path with every link followed."""
        return os.path.realpath(path)


def survey(disk: Any, site: str, tops: Mapping[str, bool]) -> dict[str, Any]:
    """The files of site-packages that a plan and a build need, by relative path.

    ``tops`` are the tracked distributions' own files and folders, and whether every file below is
    hashed whatever its size.
    """
    files: dict[str, list[Any]] = {}
    owners: dict[str, list[int]] = {}
    roots = [*sorted(tops.items()), (RECEIPTS, True), (ENV_PTH, True)] if site else []
    for top, hash_all in roots:
        for path, (*entry, uid, gid) in disk.files(f"{site}/{top}", hash_all):
            name = path[len(site) + 1 :]
            files[name] = entry
            if uid or gid:
                owners[name] = [uid, gid]
    links, folders = survey_folders(disk, site, files)
    return {"files": files, "owners": owners, "links": links, "folders": folders}


def survey_folders(
    disk: Any, site: str, files: Iterable[str]
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Links, unusual owners and modes of folders that a build may write into, and of their parents.

    Links as ``folder -> target``; ``[mode, uid, gid]`` of folders other than root's with
    mode 0755: copied folders get that, and are corrected afterwards.
    """
    leaves = {"/usr/share", "/usr/local/bin", "/workspace", site}
    leaves.update(os.path.dirname(f"{site}/{path}") for path in files)
    named = above(leaves)
    real = {path: disk.realpath(path) for path in sorted(named)}
    links = {
        path: target
        for path, target in real.items()
        if target != os.path.join(real.get(os.path.dirname(path), "/"), os.path.basename(path))
    }
    owned = {path: disk.owner(path) for path in sorted(above(real.values()))}
    odd = {path: what for path, what in owned.items() if what not in (None, [0o755, 0, 0])}
    return links, odd


def above(leaves: Iterable[str]) -> set[str]:
    """Paths and every folder above them, without the root."""
    wanted = set()
    for path in leaves:
        while path not in ("", "/") and path not in wanted:
            wanted.add(path)
            path = os.path.dirname(path)
    return wanted


def command() -> str:
    """The path of this interpreter, without following links out of a virtual environment."""
    if sys.prefix != sys.base_prefix:
        return os.path.abspath(sys.executable)
    return os.path.realpath(sys.executable)


def main() -> int:
    """Print the identity of this interpreter's environment."""
    tracked = set(json.loads(os.environ["SPARK_BUILD_TRACKED"]))
    packages: dict[str, str] = {}
    roots: dict[str, str] = {}
    tops: dict[str, dict[str, bool]] = {}
    for dist in importlib.metadata.distributions():
        raw = dist.metadata["Name"]
        name = normalize(raw) if raw else ""
        if name not in tracked or name in packages:
            continue
        root = os.path.realpath(str(dist.locate_file("")))
        packages[name], roots[name] = dist.version, root
        owned = top_levels([str(f) for f in dist.files or []])
        tops.setdefault(root, {}).update(dict.fromkeys(owned, bool(HASH_ALL.match(name))))
    site = roots.get("vllm", "")
    print(
        json.dumps(
            {
                "interpreter": command(),
                "python": f"cp{sys.version_info[0]}{sys.version_info[1]}",
                "machine": os.uname().machine,
                "site_packages": site,
                "packages": packages,
                "roots": roots,
                **survey(Disk(), site, tops.get(site, {})),
            }
        )
    )
    return 0
