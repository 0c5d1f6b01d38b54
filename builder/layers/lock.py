"""The lock file of a project: pinned inputs, and recorded facts about base images.

``spark-build.lock`` is one JSON file beside the project, sorted and one value a line.  For each
request (layers, pull requests, base, platform) it holds the base's digest, package versions and
wheels, the digest of each layer and of its files, and every input; pull requests are pinned once
for the whole file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.utils import parse_wheel_filename

from builder import settings
from builder.applier.files import DOCUMENT, read_regular
from builder.applier.layers import Compile, Diff
from builder.applier.values import sha256_hex
from builder.common.console import console
from builder.common.document import Count, Digest, Part, Sha256, Text, plain, read
from builder.common.files import write_atomically
from builder.common.hints import reason
from builder.common.plan import Commit, Pin
from builder.common.pypi import WheelFile
from builder.common.wheels import RemoteWheel
from builder.errors import Exit, RemoteError, SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.common.plan import BuildPlan, PlanDocument
    from builder.common.pypi import PackageIndex
    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.facts import RecordedFiles


# ------------------------------------------------------------------------------------ the document

#: Names of the files of facts beside the lock (``facts.py``).
FACTS_NAME = r"base-[0-9a-f]{12}\.json\.gz"


class Request(Part, frozen=True, kw_only=True):
    """The options of a locked plan: ``--layers``, ``--with-pr``, base and platform."""

    layers: tuple[str, ...]
    with_pr: tuple[str, ...] = msgspec.field(name="with-pr")
    base: str
    platform: str
    python: str

    @property
    def key(self) -> str:
        """A unique key of the request, in one line."""
        what = " + ".join([*filter(None, [",".join(self.layers)]), *self.with_pr])
        return f"{what} on {self.base} for {self.platform}, Python {self.python}"


class FactsPin(Part, frozen=True, kw_only=True):
    """The file of facts about a base, by sha256."""

    file: Annotated[str, Meta(pattern=rf"^{FACTS_NAME}\Z")]
    sha256: Sha256
    layers: Annotated[Sha256, Meta(description="one sha256 for the digests of its layers")]
    depth: Annotated[int, Meta(ge=1, description="how many layers those are")]


class LockedInput(Part, frozen=True, kw_only=True):
    """A wheel by its file name, or a pull request."""

    sha256: Sha256
    filename: Text | None = None
    size: Count | None = None
    record: Annotated[
        Sha256 | None,
        Meta(description="of the wheel's RECORD, which files read by range are held against"),
    ] = None
    request: Text | None = None
    repository: Text | None = None
    number: Count | None = None
    commit: Commit | None = None

    def __post_init__(self) -> None:
        """Refuse a wheel whose file name is none, because it becomes a path.

        Raises:
            ValueError: the file name is that of no wheel.
        """
        if self.filename is not None:
            file = WheelFile(
                filename=self.filename, url="", sha256=self.sha256, size=self.size or 0
            )
            parse_wheel_filename(file.filename)

    @property
    def subject(self) -> str:
        """A description for messages."""
        return self.filename or self.request or ""


class LockedBase(Part, frozen=True, kw_only=True):
    """The locked base."""

    kind: Text
    digest: Digest
    platform: Text
    python: Text
    packages: dict[str, str]
    wheels: tuple[LockedInput, ...] = ()
    facts: FactsPin | None = None


class LockedLayer(Part, frozen=True, kw_only=True):
    """A layer's digest, and the digests of its folder's files; none for a pull request."""

    name: Text
    digest: Sha256
    files: dict[str, Sha256]


class LockEntry(Part, frozen=True, kw_only=True):
    """The pinned inputs of the plan for one request."""

    request: Request
    base: LockedBase
    layers: tuple[LockedLayer, ...]
    inputs: tuple[LockedInput, ...]


class LockFile(Part, frozen=True, kw_only=True):
    """The whole file."""

    schema: Literal[1]
    pulls: dict[str, Pin]
    locked: dict[str, LockEntry]


# ---------------------------------------------------------------------------- the inputs of a plan


def entry_of(
    request: Request, plan: BuildPlan, folders: Mapping[str, Path], index: PackageIndex
) -> LockEntry:
    """The lock entry for a plan."""
    base = plan.base
    layers = (
        LockedLayer(name=d.name, digest=d.layer.digest, files=files_of(folders, d.name))
        for d in plan.decisions
    )
    return LockEntry(
        request=request,
        base=LockedBase(
            kind=base.kind,
            digest=base.digest,
            platform=base.platform.oci,
            python=".".join(map(str, base.platform.python_version)),
            packages=dict(sorted(base.packages.items())),
            wheels=tuple(_wheel(row.filename, row.sha256, index) for row in base.wheels),
        ),
        layers=tuple(layers),
        inputs=tuple(_inputs(plan, index)),
    )


def files_of(folders: Mapping[str, Path], layer: str) -> dict[str, str]:
    """sha256 of every file in a layer's folder; empty for a pull request's layer."""
    folder = folders.get(layer)
    if folder is None:
        return {}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): sha256_hex(read_regular(path, DOCUMENT))
        for path in files
        if "__pycache__" not in path.parts
    }


def _inputs(plan: BuildPlan, index: PackageIndex) -> Iterator[LockedInput]:
    """Wheels and pull requests that layers use."""
    rows: dict[str, LockedInput] = {}
    for decision in plan.decisions:
        for pin in decision.outcome.inputs:
            wheel = _wheel(pin.filename, pin.sha256, index, getattr(pin, "size", None))
            rows[f"wheel {wheel.filename}"] = wheel
        for op in decision.layer.ops:
            if isinstance(op, (Diff, Compile)) and op.pull:
                row = {"request": op.file, **asdict(op.pull)}
                rows[f"pull {op.file}"] = read(row, LockedInput)
    yield from (rows[key] for key in sorted(rows))


def _wheel(filename: str, sha256: str, index: PackageIndex, size: int | None = None) -> LockedInput:
    file = WheelFile(filename=filename, url="", sha256=sha256)
    wheel = index.find(file.distribution, file.filename)
    known = size or (wheel.size if wheel else 0)
    record = index.records.get(sha256)
    if record is None and wheel and wheel.sha256 == sha256:
        record = RemoteWheel(wheel, index).record
    return LockedInput(filename=filename, sha256=sha256, size=known or None, record=record)


def wheels_of(entry: LockEntry) -> list[WheelFile]:
    """The wheels of an entry, which replace the package index's pages."""
    rows = {row.filename: row for row in (*entry.base.wheels, *entry.inputs) if row.filename}
    return [
        WheelFile(
            filename=name, url="", sha256=row.sha256, size=row.size or 0, record=row.record or ""
        )
        for name, row in rows.items()
    ]


def differences(old: LockEntry, new: LockEntry) -> list[str]:
    """Differences from the lock, as messages; empty if there are none."""
    changes = []
    if old.base.digest != new.base.digest:
        changes.append(f"base: changed from {old.base.digest[:19]} to {new.base.digest[:19]}")
    changes += _changed("package", old.base.packages, new.base.packages)
    changes += layer_differences(old.layers, new.layers)
    inputs = [{row.subject: row.sha256 for row in side.inputs} for side in (old, new)]
    changes += _changed("input", *inputs)
    return changes or _changed_records(old, new)


def _changed_records(old: LockEntry, new: LockEntry) -> list[str]:
    """Wheels whose contents the lock does not pin, as no lock did before, or pins differently."""
    now = _records(new)
    return [
        f"{name}: its RECORD has sha256 {_short(now[name] or 'unknown')}, "
        + (f"locked is {_short(record)}" if record else "which is not locked yet")
        for name, record in _records(old).items()
        if name in now and record != now[name]
    ]


def _records(entry: LockEntry) -> dict[str, str | None]:
    rows = (*entry.base.wheels, *entry.inputs)
    return {row.filename: row.record for row in rows if row.filename}


def plan_differences(old: LockEntry, plan: PlanDocument) -> list[str]:
    """Differences between a plan, such as an image's, and the lock."""
    changes = _changed("package", old.base.packages, plan.base.packages)
    if old.base.digest != plan.base.digest:
        digests = old.base.digest[:19], plan.base.digest[:19]
        changes.insert(0, f"base: the lock has {digests[0]}, the target was made from {digests[1]}")
    rows = [LockedLayer(name=row.name, digest=row.digest, files={}) for row in plan.layers]
    return changes + layer_differences(old.layers, rows)


def layer_differences(old: Sequence[LockedLayer], new: Sequence[LockedLayer]) -> list[str]:
    """Layers that differ from the lock, with the changed files."""
    before = {layer.name: layer.digest for layer in old}
    after = {layer.name: layer.digest for layer in new}
    changes = _changed("layer", before, after)
    files = {layer.name: layer.files for layer in new}
    for layer in old:
        name = layer.name
        if name in after and before[name] != after[name] and files[name]:
            changes += [
                f"layer {name}: {line}" for line in _changed("file", layer.files, files[name])
            ]
    if not changes and list(before) != list(after):
        changes.append(f"layers: the order changed from {', '.join(before)} to {', '.join(after)}")
    return changes


def _changed(kind: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            lines.append(f"{kind} {name}: {'new' if was is None else 'removed'}")
        elif was != now:
            lines.append(f"{kind} {name}: changed from {_short(was)} to {_short(now)}")
    return lines


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value


def stale(path: Path, changes: Sequence[str]) -> SparkBuildError:
    """The error for a stale lock (exit 9)."""
    lines = "\n  ".join(changes)
    return SparkBuildError(f"{path} is stale:\n  {lines}", Exit.STALE, hint="spark-build lock")


# ---------------------------------------------------------------------------------------- the file

NAME = "spark-build.lock"
SCHEMA: Literal[1] = 1
#: Bytes of a lock that is read; one with ten requests has 60 kB.
_MOST_BYTES = 16 << 20


class _AnySchema(msgspec.Struct):
    schema: object = None


@dataclass
class Lock:
    """A lock file in memory."""

    path: Path
    pulls: dict[str, Pin] = field(default_factory=dict)
    entries: dict[str, LockEntry] = field(default_factory=dict)

    def data(self) -> bytes:
        """The bytes of the file: unused entries and pins are dropped.

        Raises:
            RemoteError: what an index or forge said cannot be locked.
        """
        used = {name for entry in self.entries.values() for name in entry.request.with_pr}
        pulls = {name: pin for name, pin in self.pulls.items() if name in used}
        value = plain(LockFile(schema=SCHEMA, pulls=pulls, locked=self.entries))
        try:  # what a forge or an index said is in it: never write what cannot be read again
            read(value, LockFile)
        except ValueError as error:
            raise RemoteError(
                f"{self.path} is not written: what was found is malformed: {error}"
            ) from None
        return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    def write(self) -> bool:
        """Write the file, whole or not at all; says whether it changed."""
        data = self.data()
        with contextlib.suppress(OSError, ValueError):
            if read_regular(self.path, _MOST_BYTES) == data:
                return False
        write_atomically(self.path, data)
        return True

    def of_layers(self, request: Request) -> list[LockEntry]:
        """Entries with the layers and pull requests of a request, whatever the base."""
        return [
            entry
            for entry in self.entries.values()
            if (entry.request.layers, entry.request.with_pr) == (request.layers, request.with_pr)
        ]


def project_root(start: Path) -> Path:
    """The nearest directory upwards that is a git checkout, else ``start`` itself."""
    start = start.resolve()
    return next((at for at in (start, *start.parents) if (at / ".git").exists()), start)


def lock_path(start: Path) -> Path:
    """Where the lock is, or would be written.

    ``SPARK_BUILD_LOCK``, else the nearest lock from here up to the project's root, else the root.
    """
    named = settings.LOCK.value
    if named:
        return Path(named).expanduser()
    root = project_root(start)
    here = start.resolve()
    places = [here, *here.parents]
    places = places[: places.index(root) + 1]
    return next((p for p in (at / NAME for at in places) if p.is_file()), root / NAME)


def read_lock(path: Path) -> Lock | None:
    """Read a lock, or None where there is none.

    Raises:
        SparkBuildError: it is damaged, or of a newer spark-build (exit 9).
    """
    try:
        data = read_regular(path, _MOST_BYTES)
        schema = msgspec.json.decode(data, type=_AnySchema).schema
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, reason(error)) from None
    if isinstance(schema, int) and schema != SCHEMA:
        raise SparkBuildError(
            f"{path} has schema {schema}, this spark-build knows {SCHEMA}",
            Exit.STALE,
            hint="install a newer spark-build",
        )
    try:
        document = msgspec.json.decode(data, type=LockFile)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    for key, entry in document.locked.items():
        if entry.request.key != key:
            raise _damaged(path, f"the entry {key!r} is for {entry.request.key!r}")
    return Lock(path, document.pulls, document.locked)


def _damaged(path: Path, why: str) -> SparkBuildError:
    hint = "restore it, or remove it and lock again: spark-build lock --layers L --base BASE"
    return SparkBuildError(f"{path} cannot be used: {why}", Exit.STALE, hint=hint)


# ------------------------------------------------------------------------------ facts about images
#
# One file in ``spark-build.lock.d/`` for each base and platform, pinned in the lock by sha256: the
# facts about its layers when it was locked (``images/rootfs/facts.py``).  With it an image base is
# identified, planned for and built on without reading its layers, on a machine that has never seen
# it.

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
        UsageError: the file cannot be written.
    """
    data = pack(facts)
    for pin in old:
        path = folder_of(lock) / pin.file
        present = b""
        with contextlib.suppress(OSError, ValueError):
            present = read_regular(path, _PACKED)
        if sha256_hex(present) == pin.sha256 and _text(present) == _text(data):
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
