"""Run inside an image by its own interpreter: which packages are where, and what their files are.

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

#: Files above this size (bytes) are hashed only where a layer may replace them.
LARGE = 8_000_000
HASH_ALL = re.compile(r"^nvidia-cutlass-dsl")


def normalize(name: str) -> str:
    """A distribution name in its PEP 503 form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def describe(path: str, hash_all: bool) -> list[object] | None:
    """``[size, mode, sha256 or null]`` of a regular file, or None."""
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
    return [info.st_size, stat.S_IMODE(info.st_mode), digest]


def top_levels(record: list[str]) -> set[str]:
    """First path components of what a distribution owns in site-packages."""
    return {row.split("/")[0] for row in record if row and not row.startswith(("/", ".."))}


def odd_folders(site: str, files: dict[str, list[object]]) -> dict[str, list[int]]:
    """``[mode, uid, gid]`` of folders that are not root's with mode 0755.

    A copied folder arrives as root's with mode 0755; these are put back afterwards.
    """
    leaves = {"/usr/share", "/usr/local/bin", "/workspace", site}
    leaves.update(os.path.dirname(os.path.join(site, path)) for path in files)
    wanted = set()
    for path in leaves:
        while path not in ("", "/") and path not in wanted:
            wanted.add(path)
            path = os.path.dirname(path)
    odd = {}
    for path in sorted(wanted):
        try:
            info = os.stat(path)
        except OSError:
            continue
        found = [stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid]
        if found != [0o755, 0, 0]:
            odd[path] = found
    return odd


def main() -> None:
    """Print the identity of this interpreter's environment."""
    tracked = set(json.loads(os.environ["SPARK_BUILD_TRACKED"]))
    packages: dict[str, str] = {}
    roots: dict[str, str] = {}
    tops: dict[str, tuple[str, bool]] = {}
    for dist in importlib.metadata.distributions():
        raw = dist.metadata["Name"]
        name = normalize(raw) if raw else ""
        if name not in tracked or name in packages:
            continue
        root = os.path.realpath(str(dist.locate_file("")))
        packages[name], roots[name] = dist.version, root
        record = [str(f) for f in dist.files or []]
        for top in top_levels(record):
            tops[os.path.join(root, top)] = (root, bool(HASH_ALL.match(name)))
    files: dict[str, list[object]] = {}
    site = roots.get("vllm", "")
    for top, (root, hash_all) in sorted(tops.items()):
        if root != site:
            continue
        paths = [top] if os.path.isfile(top) else []
        for folder, _, names in os.walk(top):
            paths.extend(os.path.join(folder, name) for name in names)
        for path in paths:
            entry = describe(path, hash_all)
            if entry is not None:
                files[os.path.relpath(path, site)] = entry
    receipts = os.path.join(site, ".spark-build", "receipts")
    if site and os.path.isdir(receipts):
        for name in os.listdir(receipts):
            entry = describe(os.path.join(receipts, name), True)
            if entry is not None:
                files[f".spark-build/receipts/{name}"] = entry
    folders = odd_folders(site, files)
    print(
        json.dumps(
            {
                "folders": folders,
                "interpreter": os.path.realpath(sys.executable),
                "python": f"cp{sys.version_info[0]}{sys.version_info[1]}",
                "machine": os.uname().machine,
                "site_packages": site,
                "packages": packages,
                "roots": roots,
                "files": files,
            }
        )
    )


if __name__ == "__main__":
    main()
