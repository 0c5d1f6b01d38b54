"""The lock's facts about images, in files next to it: ``spark-build.lock.d/``.

One file for each base and platform, pinned in the lock by sha256: the facts about its layers when
it was locked (``rootfs/facts.py``).  With it an image base is identified, planned for and built on
without reading its layers, on a machine that has never seen it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.common.console import console
from builder.common.paths import read_regular
from builder.common.pypi import write_atomically
from builder.errors import Exit, SparkBuildError
from builder.layers.lock.document import FACTS_NAME, FactsPin
from builder.layers.lock.file import read_lock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.facts import RecordedFiles
    from builder.layers.lock.document import LockEntry
    from builder.layers.lock.file import Lock

#: Bytes of a file of facts, packed and unpacked; a vLLM image takes 1 MB and 8 MB.
_PACKED, _UNPACKED = 64 << 20, 512 << 20


def folder_of(lock: Path) -> Path:
    """Where the facts of a lock lie."""
    return lock.with_name(f"{lock.name}.d")


def chain(layers: Iterable[str]) -> str:
    """One sha256 (hex) for the digests of some layers in their order."""
    return sha256_hex("\n".join(layers).encode())


def pins_of(entries: Iterable[LockEntry]) -> dict[str, FactsPin]:
    """The pins of some entries, by the name of their file."""
    pins = (entry.base.facts for entry in entries)
    return {pin.file: pin for pin in pins if pin}


def pack(facts: RecordedFiles) -> bytes:
    """The bytes of a file of facts."""
    return gzip.compress(json.dumps(facts.as_json(), separators=(",", ":")).encode(), 9, mtime=0)


def read_facts(lock: Path, pin: FactsPin) -> RecordedFiles:
    """The facts of a pin.

    Raises:
        SparkBuildError: the file does not exist, is not what is pinned, or is about other layers
            (exit 9).
    """
    from builder.images.rootfs.facts import RecordedFiles  # takes sqlite3 along

    path = folder_of(lock) / pin.file
    try:
        data = read_regular(path, _PACKED)
        if sha256_hex(data) != pin.sha256:
            raise ValueError(f"sha256 is {sha256_hex(data)[:12]}, locked is {pin.sha256[:12]}")
        unpack = zlib.decompressobj(wbits=31)
        text = unpack.decompress(data, _UNPACKED)
        if not unpack.eof:
            raise ValueError("it is cut off, or too large")
        facts = RecordedFiles.parse(json.loads(text))
        if len(facts.layers) != pin.depth or chain(facts.layers) != pin.layers:
            raise ValueError("it belongs to another image")
    except (OSError, ValueError, RecursionError, zlib.error) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise SparkBuildError(
            f"{path}, which the lock pins, cannot be used: {why}",
            Exit.STALE,
            hint="restore it, or create the lock again: spark-build lock",
        ) from None
    return facts


def write_facts(lock: Path, facts: RecordedFiles, old: Iterable[FactsPin] = ()) -> FactsPin:
    """Write a file of facts and give its pin; one of the old pins where its file says the same.

    Files are named by what they hold: until the lock is written, the one that it pins stays.

    Raises:
        UsageError: it cannot be written.
    """
    data = pack(facts)
    for pin in old:
        path = folder_of(lock) / pin.file
        held = b""
        with contextlib.suppress(OSError, ValueError):
            held = read_regular(path, _PACKED)
        if sha256_hex(held) == pin.sha256 and _text(held) == _text(data):
            return pin  # also where another zlib has packed it
    sha256 = sha256_hex(data)
    name = f"base-{sha256[:12]}.json.gz"
    write_atomically(folder_of(lock) / name, data)
    layers = chain(facts.layers)
    return FactsPin(file=name, sha256=sha256, layers=layers, depth=len(facts.layers))


def _text(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data, _UNPACKED)
    except zlib.error:
        return b""


def remove_unnamed(lock: Lock) -> None:
    """Remove the files of facts that no entry names; other files are kept."""
    named = pins_of(lock.entries.values())
    folder = folder_of(lock.path)
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch(FACTS_NAME, path.name) and path.name not in named:
            path.unlink()
            console.say(f"  {path} removed: the lock no longer uses it")


class LockedFacts:
    """The facts that a lock pins, found by the layers of an image.

    With ``strict``, as with ``--locked``, a file that cannot be used is an error; otherwise it is
    said, and the layers are read.
    """

    def __init__(self, lock: Lock | None, *, strict: bool) -> None:
        self._lock, self._strict = lock, strict
        self._read: dict[str, RecordedFiles | None] = {}

    @classmethod
    def beside(cls, path: Path) -> LockedFacts:
        """Those of a lock that nothing else is wanted of: one that cannot be read pins none."""
        try:
            return cls(read_lock(path), strict=False)
        except SparkBuildError as error:
            console.warn(f"{error}")
            return cls(None, strict=False)

    def of(self, layers: Sequence[Descriptor]) -> RecordedFiles | None:
        """What is known of the lowest layers of an image, which are given bottom first.

        Raises:
            SparkBuildError: the file is not what the lock pins (exit 9).
        """
        digests = [layer.digest for layer in layers]
        pins = pins_of(self._lock.entries.values()) if self._lock else {}
        for pin in pins.values():
            if chain(digests[: pin.depth]) == pin.layers:
                return self._facts(pin)
        return None

    def _facts(self, pin: FactsPin) -> RecordedFiles | None:
        assert self._lock is not None
        name = pin.file
        if name not in self._read:
            self._read[name] = None
            try:
                self._read[name] = read_facts(self._lock.path, pin)
                console.detail(
                    f"{folder_of(self._lock.path) / name} lists the contents of the layers"
                )
            except SparkBuildError as error:
                if self._strict:
                    raise
                console.warn(f"{error}; reading the layers instead")
        return self._read[name]
