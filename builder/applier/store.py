"""Commits layers to a real site-packages directory, completely or not at all, and reverts them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from builder.applier.edits import ENV_PTH, env_pth
from builder.applier.files import open_regular, read_regular
from builder.applier.receipts import (
    STATE_DIR,
    FileEntry,
    Original,
    given,
    is_inside,
    kept_true,
    make_receipt,
    parse_record,
    present,
    receipt_bytes,
    receipt_path,
    receipts_of,
    settled_records,
    true_records,
    unexplained,
    untouched_rows,
)
from builder.applier.trees import (
    Changes,
    Content,
    DirTree,
    OverlayTree,
    Tree,
    drop_empty,
    prune,
    stale_pyc,
)
from builder.applier.values import EXIT_DRIFT, EXIT_USAGE, ApplyError, is_sha256, say, sha256_hex

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from builder.applier.layers import Layer
    from builder.applier.receipts import Receipt
    from builder.applier.states import Outcome

#: What a change is rolled back with, and what says which layers a revert is removing.
_JOURNAL, _REVERTING = "journal.json", "reverting.json"
#: Bytes of either; a change to 20,000 files has 6 MB.
_NOTE_BYTES = 64 << 20
_BLOCK = 1 << 20
#: What restores a file besides its bytes, with the types.
_FACTS = (("link", str), ("mode", int), ("mtime_ns", int))


@dataclass(frozen=True)
class Swap:
    """A file to be swapped by a change, with the data for a rollback."""

    path: str
    #: the file to be replaced, whose bytes go to the backup; None if there is none
    original: Original | None = None
    #: whether the file itself is moved to the backup
    moves: bool = False
    #: the topmost folder, or the file, that is new
    made: str | None = None

    @classmethod
    def read(cls, raw: object) -> Swap:
        """Read an entry of a journal, checked before it is used.

        Raises:
            ValueError: it is damaged.
        """
        keys = raw if isinstance(raw, dict) else {}
        path, backup, moves, made = (keys.get(key) for key in ("path", "backup", "moves", "made"))
        facts = {key: keys[key] for key, _ in _FACTS if key in keys}
        good = all(isinstance(facts.get(key, kind()), kind) for key, kind in _FACTS)
        if good and is_inside(path) and (made is None or is_inside(made)):
            if is_sha256(backup) and isinstance(moves, bool):
                return cls(path, Original(before=backup, **facts), moves, made)
            if backup is None and "made" in keys:
                return cls(path, made=made)
        raise ValueError(f"invalid entry: {raw!r:.80}")

    def as_json(self) -> dict[str, object]:
        """The entry, as it is written to a journal."""
        facts = given(self.original or Original())
        swap = {"path": self.path, "backup": facts.pop("before", None), "made": self.made}
        return {**swap, "moves": self.moves, **facts}


class Journal:
    """Writes a real site-packages directory; nothing else does.

    A change is journalled: originals are moved to ``.spark-build/backup`` and new files, staged
    before, are renamed into place.  An interruption is rolled back immediately; a kill is rolled
    back by the next command.  It is a context manager that holds the directory's lock.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / STATE_DIR
        self._lock: Any = None

    def __enter__(self) -> Self:
        try:
            taken = any(self._take_lock() for _ in range(100))
        except BlockingIOError:
            taken = False
        except OSError as error:
            raise ApplyError(
                f"{self.root}: cannot write ({error.strerror}: {error.filename})", EXIT_USAGE
            ) from error
        if not taken:
            raise ApplyError(
                f"{self.root}: another spark-build is writing to it",
                EXIT_USAGE,
                "wait for it to end, then run the same command again",
            )
        try:
            self._refuse_odd_state()
            if os.path.lexists(self.state / _JOURNAL):
                say(f"{self.root}: rolling back a change that was interrupted")
                self._roll_back()
        except BaseException:
            self._lock.close()
            raise
        return self

    def _refuse_odd_state(self) -> None:
        """Refuse folders of ours that are links or files: they would lead elsewhere.

        Raises:
            ApplyError: one of them is a link or a file.
        """
        for path in (self.state, *(self.state / name for name in ("backup", "stage", "receipts"))):
            if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                raise ApplyError(
                    f"{path} is not a folder of spark-build's: it is a link or a file",
                    EXIT_USAGE,
                    f"remove {path}, then reinstall the packages",
                )

    def _refuse_outside(self, paths: Iterable[str]) -> None:
        """Refuse to write below a folder that is a link out of the directory.

        Raises:
            ApplyError: a path is below such a link.
        """
        top = os.path.realpath(self.root)
        for folder in sorted({path.rpartition("/")[0] for path in paths}):
            real = os.path.realpath(self.root / folder)
            if os.path.commonpath([top, real]) != top:
                raise ApplyError(
                    f"{self.root / folder} leads out of {self.root}, to {real}; "
                    "nothing was changed",
                    EXIT_USAGE,
                    "put a folder in the place of the link",
                )

    def _take_lock(self) -> bool:
        """Lock the directory; False if the lock file was removed by its last holder.

        Between making the folder, opening the file in it and locking it, another process may
        remove both (see :meth:`__exit__`); a lock on a removed file would have no effect.
        """
        import fcntl

        with contextlib.suppress(FileExistsError):
            self.state.mkdir()
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            number = os.open(self.state / "lock", flags, 0o644)
            lock = stack.enter_context(os.fdopen(number, "rb", buffering=0))
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.state / "lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(self.state / "lock")):
                stack.pop_all()
                self._lock = lock
                return True
        return False

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.state / "stage", ignore_errors=True)
        if not (self.state / "receipts").is_dir():
            with contextlib.suppress(OSError):
                self._clear()
                (self.state / "lock").unlink()  # last: from now on another process may be in here
                self.state.rmdir()
        self._lock.close()

    def _clear(self) -> None:
        """Empty our folder, except the lock."""
        for name in os.listdir(self.state):
            path = self.state / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif name != "lock":
                path.unlink()

    def _first_missing(self, path: str, ours: Iterable[str | None] = ()) -> str | None:
        """The topmost part of a path that does not exist, or that other layers created."""
        parts = path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        return next((p for p in above if p in ours or not os.path.lexists(self.root / p)), None)

    def _now(self, path: str, digest: str | None) -> Original:
        """What restores a file that has a digest now."""
        target = self.root / path
        info = target.stat()
        link = os.readlink(target) if target.is_symlink() else None
        return Original(digest, stat.S_IMODE(info.st_mode), info.st_mtime_ns, link)

    def _write(self, changes: Changes) -> None:
        self._refuse_outside(changes)
        stage = self.state / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        staged: dict[str, Path] = {}
        try:
            stage.mkdir(parents=True)
            (self.state / "backup").mkdir(exist_ok=True)
            for number, (path, content) in enumerate(sorted(changes.items())):
                if content is not None:
                    staged[path] = stage / str(number)
                    staged[path].write_bytes(content.read())
                    staged[path].chmod(content.mode)
            self._swap(changes, staged)
        except BaseException as error:
            if (self.state / _JOURNAL).exists():
                self._roll_back()
            shutil.rmtree(stage, ignore_errors=True)
            if isinstance(error, OSError):
                raise ApplyError(
                    f"{self.root}: cannot write ({error.strerror}: {error.filename}); "
                    "nothing was changed",
                    EXIT_USAGE,
                ) from error
            raise

    def _swap(self, changes: Changes, staged: Mapping[str, Path]) -> None:
        tree, kept = DirTree(self.root), DirTree(self.state / "backup")
        journal: list[Swap] = []
        backups: set[str] = set()
        for path in sorted(changes):
            digest = tree.digest(path)
            if digest is None:
                journal.append(Swap(path, made=self._first_missing(path)))
                continue
            moves = digest not in backups and kept.digest(digest) != digest
            journal.append(Swap(path, self._now(path, digest), moves=moves))
            backups.add(digest)
        self._put(_JOURNAL, json.dumps([entry.as_json() for entry in journal]).encode())
        for entry in journal:
            target = self.root / entry.path
            if entry.original is not None:
                backup = self.state / "backup" / str(entry.original.before)
                if entry.moves and entry.original.link is not None:
                    shutil.copyfile(target, backup)
                elif entry.moves:
                    target.rename(backup)
                if entry.path not in staged:
                    target.unlink(missing_ok=True)
            if entry.path in staged:
                target.parent.mkdir(parents=True, exist_ok=True)
                staged[entry.path].replace(target)
        for path in changes:
            if path not in staged:
                prune((self.root / path).parent, self.root)
        (self.state / _JOURNAL).unlink()

    def _put(self, name: str, data: bytes) -> None:
        partial = self.state / f"{name}.part"
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.state / name)

    def _roll_back(self) -> None:
        journal = self._journal()
        self._refuse_outside(p for one in journal for p in (one.path, one.made) if p is not None)
        kept = DirTree(self.state / "backup")
        good = [self._can_restore(entry, kept) for entry in journal]
        for entry, restorable in reversed(list(zip(journal, good, strict=True))):
            target, original = self.root / entry.path, entry.original
            if original is not None and restorable:
                if entry.moves and original.link is None:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (kept.root / str(original.before)).replace(target)  # no copy: a full disk
                else:
                    self._restore(entry.path, original)
            elif original is None and entry.made is not None:
                created = self.root / entry.made
                if created.is_dir() and not created.is_symlink():
                    shutil.rmtree(created)
                else:
                    created.unlink(missing_ok=True)
        (self.state / _JOURNAL).unlink()

    def _can_restore(self, entry: Swap, kept: DirTree) -> bool:
        """Whether the original of a journal's entry is to be restored; it may not have moved yet.

        Raises:
            ApplyError: it is in neither place.
        """
        original = entry.original
        if original is None or original.link is not None:
            return original is not None
        before = str(original.before)
        if kept.digest(before) == before:
            return True
        if DirTree(self.root).digest(entry.path) != before:
            raise self._lost(entry.path)
        return False

    def _lost(self, path: str) -> ApplyError:
        """The error for a file whose original is nowhere."""
        return ApplyError(
            f"the original of {path} is missing or damaged in {self.state / 'backup'}",
            EXIT_DRIFT,
            f"{_reinstall(DirTree(self.root), path)}, then revert again",
        )

    def _journal(self) -> list[Swap]:
        """The journal of an interrupted change, checked before it is used."""
        path = self.state / _JOURNAL
        try:
            entries = json.loads(read_regular(path, _NOTE_BYTES))
            return [Swap.read(one) for one in (entries if isinstance(entries, list) else [entries])]
        except (OSError, ValueError, RecursionError) as error:
            raise ApplyError(
                f"{path} of an interrupted change is damaged: {error}",
                EXIT_DRIFT,
                f"remove {self.state}, then reinstall the packages",
            ) from None

    def _restore(self, path: str, original: Original) -> None:
        """Restore a file from the backup, with its mode and time.

        Raises:
            ApplyError: the backup is not the original; the file is as it was.
        """
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".spark-build")
        partial.unlink(missing_ok=True)
        if original.link is not None:
            partial.symlink_to(original.link)
        else:
            backup = self.state / "backup" / str(original.before)
            if self._copied(backup, partial) != original.before:
                partial.unlink()
                raise self._lost(path)
            partial.chmod(0o644 if original.mode is None else original.mode)
            if original.mtime_ns is not None:
                os.utime(partial, ns=(original.mtime_ns, original.mtime_ns))
        partial.replace(target)

    @staticmethod
    def _copied(source: Path, target: Path) -> str:
        """Copy a file; returns the sha256 of what was written."""
        digest = hashlib.sha256()
        with open(target, "xb") as out, open_regular(source) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                out.write(block)
        return digest.hexdigest()


def _reinstall(tree: Tree, path: str) -> str:
    """The command that installs the distribution of a file again."""
    for dist in tree.distributions().values():
        record = tree.read(f"{dist.info_dir}/RECORD") or b""
        if path.startswith(f"{dist.info_dir}/") or f"\n{path},".encode() in b"\n" + record:
            return f"pip install --force-reinstall --no-deps {dist.name}=={dist.version}"
    return f"install {path.partition('/')[0]} again"


# ------------------------------------------------------------------------------ commits and reverts


def unfinished(root: Path) -> str:
    """What is unfinished in a directory: ``apply`` or ``revert``; empty if nothing is."""
    names = {_JOURNAL: "apply", _REVERTING: "revert"}
    there = (word for name, word in names.items() if os.path.lexists(root / STATE_DIR / name))
    return next(there, "")


def refuse_unfinished_revert(root: Path) -> None:
    """Refuse a directory in which a revert was interrupted: some files are as before a layer.

    Raises:
        ApplyError: a revert was interrupted there.
    """
    if unfinished(root) == "revert":
        raise ApplyError(
            f"{root}: a revert was interrupted, so some files are as before their layers",
            EXIT_DRIFT,
            "run revert again, then apply",
        )


class Store(Journal):
    """Layers in a real site-packages directory; a context manager, as `Journal` is."""

    def commit(self, layer: Layer, outcome: Outcome) -> Receipt:
        """Write a needed layer's changes and its receipt, all or nothing.

        Raises:
            ApplyError: the disk is full or a file cannot be written; the tree is unchanged.
        """
        refuse_unfinished_revert(self.root)
        tree = DirTree(self.root)
        receipts = receipts_of(tree)
        number = 1 + max((r.sequence for r in receipts), default=0)
        changed = settled_records(layer, outcome.changes, tree)
        receipt = make_receipt(layer, outcome, tree, number, changed)
        previous = next((r for r in receipts if r.layer == layer.name), None)
        changes: Changes = {**outcome.changes, **changed}
        ours = {entry.made for r in receipts for entry in r.files.values()}
        files = {path: self._noted(path, entry, ours) for path, entry in receipt.files.items()}
        records = {
            path: self._original(path, receipts) or self._now(path, tree.digest(path))
            for path in changed
        }
        if previous is not None:
            files = _with_originals(files, previous.files, tree, kept_true(receipts))
            records = {**(previous.records or {}), **records}
        receipt = replace(receipt, files=files, records=records)
        changes[receipt_path(layer.name)] = Content.of(receipt_bytes(receipt))
        merged: dict[str, str] = {}
        for earlier in [*(r for r in receipts if r is not previous), receipt]:
            merged.update(earlier.env)
        if merged:
            changes[ENV_PTH] = Content.of(env_pth(merged))
        self._write(changes)
        return receipt

    def _noted(self, path: str, entry: FileEntry, ours: Collection[str | None]) -> FileEntry:
        """The entry of a file, with what a revert of it needs."""
        if entry.before is None:
            return replace(entry, made=self._first_missing(path, ours))
        original = self._now(path, entry.before)
        return FileEntry(**vars(original), after=entry.after, ops=entry.ops)

    def revert(self, names: Sequence[str] | None, force: bool = False) -> list[str]:
        """Restore the exact bytes from before the given layers (None means all).

        A revert that was interrupted is completed, with its own layers.  Returns the reverted
        layers, last applied first.

        Raises:
            ApplyError: a file was edited since, or a remaining layer depends on a reverted one.
        """
        receipts = receipts_of(DirTree(self.root))
        before = self._reverting()
        going = [r for r in receipts if names is None or r.layer in (*names, *before)]
        staying = [r for r in receipts if r not in going]
        self._refuse_entangled(going, staying)
        self._refuse_edited(going, receipts, force)
        self._refuse_outside(
            p for r in going for p in (*r.files, *(r.records or ()), *_made(r.files.values()))
        )
        self._refuse_lost(going, force)
        if going:
            self._put(_REVERTING, json.dumps([r.layer for r in going]).encode())
        for receipt in reversed(going):
            self._put_back(receipt)
        self._put_records_back(going, receipts)
        for receipt in reversed(going):
            (self.root / receipt_path(receipt.layer)).unlink()
        merged: dict[str, str] = {}
        for receipt in staying:
            merged.update(receipt.env)
        if merged:
            self._put("env.pth", env_pth(merged))
            (self.state / "env.pth").replace(self.root / ENV_PTH)
        else:
            (self.root / ENV_PTH).unlink(missing_ok=True)
        if not staying:
            self._clear()
        (self.state / _REVERTING).unlink(missing_ok=True)
        return [r.layer for r in reversed(going)]

    def _reverting(self) -> list[str]:
        """The layers of a revert that was interrupted."""
        try:
            names = json.loads(read_regular(self.state / _REVERTING, _NOTE_BYTES))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError):  # by hand: all that is there is checked
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @staticmethod
    def _refuse_entangled(going: Sequence[Receipt], staying: Sequence[Receipt]) -> None:
        for gone in going:
            for remaining in staying:
                pair = (gone, remaining), (remaining, gone)
                if any(one.compiled_with == other.layer for one, other in pair):
                    raise ApplyError(
                        f"layers {gone.layer} and {remaining.layer} are compiled into one "
                        f"extension wheel, so {gone.layer} cannot be reverted alone",
                        EXIT_DRIFT,
                        f"revert {remaining.layer} too",
                    )
                both = set(gone.files) & {*remaining.files, *(remaining.records or ())}
                if remaining.sequence > gone.sequence and both:
                    raise ApplyError(
                        f"layer {remaining.layer} was applied on top of {gone.layer} "
                        f"({min(both)}), so {gone.layer} cannot be reverted alone",
                        EXIT_DRIFT,
                        f"revert {remaining.layer} too",
                    )

    def _refuse_edited(
        self, going: Sequence[Receipt], receipts: Sequence[Receipt], force: bool
    ) -> None:
        tree = DirTree(self.root)
        on_the_way: dict[str, set[str | None]] = {}  # what an interrupted revert may have left
        for receipt in going:
            for path, entry in receipt.files.items():
                on_the_way.setdefault(path, set()).add(entry.before)
        for receipt in going:
            edited = [] if force else unexplained(receipt, receipts, tree)
            edited = [path for path in edited if tree.digest(path) not in on_the_way[path]]
            if edited:
                raise ApplyError(
                    f"{edited[0]} was changed after layer {receipt.layer} was applied; "
                    f"reverting would lose that edit",
                    EXIT_DRIFT,
                    "check the file, then use --force to restore the original anyway",
                )

    def _refuse_lost(self, going: Sequence[Receipt], force: bool) -> None:
        tree, backup = DirTree(self.root), DirTree(self.state / "backup")
        for receipt in going:
            for path, entry in receipt.files.items():
                before = entry.before
                if before is None or tree.digest(path) == before:
                    continue
                if backup.digest(before) != before:
                    raise self._lost(path)
            for path, original in {} if force else (receipt.records or {}).items():
                before = original.before
                if before in (None, tree.digest(path)) or backup.digest(str(before)) == before:
                    continue
                if not _rows_are_original(tree.read(path), going):
                    raise self._lost(path)

    def _put_back(self, receipt: Receipt) -> None:
        for path, entry in receipt.files.items():
            target = self.root / path
            if entry.before is None:
                target.unlink(missing_ok=True)
                created = self.root / (entry.made or path)
                drop_empty(target.parent, created.parent)
                continue
            tree = DirTree(self.root)
            if tree.digest(path) != entry.before:
                self._restore(path, entry)
            elif entry.mode is not None and entry.mode != tree.mode(path):
                target.chmod(entry.mode)
                if entry.mtime_ns is not None:
                    os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
        replaced = [path for path, entry in receipt.files.items() if entry.before is not None]
        for stale in stale_pyc(DirTree(self.root), replaced):
            if stale not in receipt.files:
                (self.root / stale).unlink(missing_ok=True)

    # -- RECORD

    def _original(self, path: str, receipts: Sequence[Receipt]) -> Original | None:
        """The original of a RECORD before these layers, if they wrote it and the backup has it."""
        known = [r.records[path] for r in receipts if r.records and path in r.records]
        now = DirTree(self.root).read(path)
        if not known or known[-1].before is None or now is None:
            return None
        backup = DirTree(self.state / "backup").read(known[-1].before)
        if backup is not None and sha256_hex(backup) != known[-1].before:
            backup = None
        if backup is None and sha256_hex(now) != known[-1].before:
            return None
        touched = {file for receipt in receipts for file in receipt.files}
        same = untouched_rows(backup or now, touched) == untouched_rows(now, touched)
        return known[-1] if same else None

    def _put_records_back(self, going: Sequence[Receipt], receipts: Sequence[Receipt]) -> None:
        """Restore the RECORD files of reverted layers.

        If another program has changed one since, only its rows are updated.
        """
        staying = [r for r in receipts if r not in going]
        for path in sorted(kept_true(going)):
            data = DirTree(self.root).read(path)
            if data is None:
                continue
            original = self._original(path, receipts)
            others = [r for r in (staying if original else going) if path in (r.records or ())]
            kept = DirTree(self.state / "backup").read(str(original.before)) if original else None
            if original is not None and kept is not None and sha256_hex(kept) == original.before:
                data = kept
            for receipt in others:
                tree = OverlayTree(DirTree(self.root))
                tree.update({path: Content.of(data)})
                now = present(self.root, receipt.files)
                content = true_records(tree, now, receipt.package).get(path)
                data = content.read() if content is not None else data
            if original is not None and sha256_hex(data) == original.before:
                self._restore(path, original)
            elif data != DirTree(self.root).read(path):
                self._put("record", data)
                (self.state / "record").chmod(DirTree(self.root).mode(path))
                (self.state / "record").replace(self.root / path)


def _made(entries: Iterable[FileEntry]) -> Iterator[str]:
    return (entry.made for entry in entries if entry.made is not None)


def _rows_are_original(data: bytes | None, receipts: Sequence[Receipt]) -> bool:
    """Whether a RECORD has the rows from before some layers, as after a reinstallation."""
    try:
        rows = {row.path: row.sha256 for row in parse_record(data or b"")}
    except ValueError:
        return False
    first: dict[str, str | None] = {}
    for receipt in receipts:
        for path, entry in receipt.files.items():
            first.setdefault(path, entry.before)
    return all(rows.get(path) in (None, before) for path, before in first.items())


def _with_originals(
    files: Mapping[str, FileEntry],
    older: Mapping[str, FileEntry],
    tree: Tree,
    records: Collection[str],
) -> dict[str, FileEntry]:
    """Files with the originals of those that an older version of the layer changed.

    Files that another program (such as a package manager) has replaced since keep their own;
    RECORD files among them were updated by other layers.
    """
    entries = dict(files)
    for path, entry in older.items():
        now, digest = files.get(path), tree.digest(path)
        if digest != entry.after and (path not in records or digest is None):
            continue
        entries[path] = entry if now is None else replace(entry, after=now.after, ops=now.ops)
    return dict(sorted(entries.items()))
