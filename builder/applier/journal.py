"""Changes a real site-packages directory completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.applier.digests import is_sha256
from builder.applier.failures import EXIT_DRIFT, EXIT_USAGE, ApplyError, say
from builder.applier.folders import prune
from builder.applier.receipts import STATE_DIR, Original, given, is_inside
from builder.applier.trees import Changes, DirTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Self

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
        held = raw if isinstance(raw, dict) else {}
        path, backup, moves, made = (held.get(key) for key in ("path", "backup", "moves", "made"))
        facts = {key: held[key] for key, _ in _FACTS if key in held}
        good = all(isinstance(facts.get(key, kind()), kind) for key, kind in _FACTS)
        if good and is_inside(path) and (made is None or is_inside(made)):
            if is_sha256(backup) and isinstance(moves, bool):
                return cls(path, Original(before=backup, **facts), moves, made)
            if backup is None and "made" in held:
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
        if (self.state / "journal.json").exists():
            say(f"{self.root}: rolling back a change that was interrupted")
            self._roll_back()
        return self

    def _take_lock(self) -> bool:
        """Lock the directory; False if the lock file was removed by its last holder.

        Between making the folder, opening the file in it and locking it, another process may
        remove both (see :meth:`__exit__`); a lock on a removed file would have no effect.
        """
        import fcntl

        with contextlib.suppress(FileExistsError):
            self.state.mkdir()
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(self.state / "lock", "w"))
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
            if path.is_dir():
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
            if (self.state / "journal.json").exists():
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
        tree = DirTree(self.root)
        journal: list[Swap] = []
        held = set(os.listdir(self.state / "backup"))
        for path in sorted(changes):
            digest = tree.digest(path)
            if digest is None:
                journal.append(Swap(path, made=self._first_missing(path)))
                continue
            journal.append(Swap(path, self._now(path, digest), moves=digest not in held))
            held.add(digest)
        self._put("journal.json", json.dumps([entry.as_json() for entry in journal]).encode())
        for entry in journal:
            target = self.root / entry.path
            if entry.original is not None:
                kept = self.state / "backup" / str(entry.original.before)
                if entry.moves and entry.original.link is not None:
                    shutil.copyfile(target, kept)
                elif entry.moves:
                    target.rename(kept)
                if entry.path not in staged:
                    target.unlink(missing_ok=True)
            if entry.path in staged:
                target.parent.mkdir(parents=True, exist_ok=True)
                staged[entry.path].replace(target)
        for path in changes:
            if path not in staged:
                prune((self.root / path).parent, self.root)
        (self.state / "journal.json").unlink()

    def _put(self, name: str, data: bytes) -> None:
        partial = self.state / f"{name}.part"
        with open(partial, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.state / name)

    def _roll_back(self) -> None:
        for entry in reversed(self._journal()):
            target, original = self.root / entry.path, entry.original
            if original is not None:
                kept = self.state / "backup" / str(original.before)
                is_link = original.link is not None
                if kept.exists() and entry.moves and not is_link:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    kept.replace(target)  # no copy: the disk may be full
                elif kept.exists() or is_link:
                    self._restore(entry.path, original)
            elif entry.made is not None:
                made = self.root / entry.made
                if made.is_dir():
                    shutil.rmtree(made)
                else:
                    made.unlink(missing_ok=True)
        (self.state / "journal.json").unlink()

    def _journal(self) -> list[Swap]:
        """The journal of an interrupted change, checked before it is used."""
        path = self.state / "journal.json"
        try:
            entries = json.loads(path.read_bytes())
            return [Swap.read(one) for one in (entries if isinstance(entries, list) else [entries])]
        except (ValueError, RecursionError) as error:
            raise ApplyError(
                f"{path} of an interrupted change is damaged: {error}",
                EXIT_DRIFT,
                f"remove {self.state}, then reinstall the packages",
            ) from None

    def _restore(self, path: str, original: Original) -> None:
        """Restore a file from the backup, with its mode and time."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".spark-build")
        partial.unlink(missing_ok=True)
        if original.link is not None:
            partial.symlink_to(original.link)
        else:
            shutil.copyfile(self.state / "backup" / str(original.before), partial)
            partial.chmod(0o644 if original.mode is None else original.mode)
            if original.mtime_ns is not None:
                os.utime(partial, ns=(original.mtime_ns, original.mtime_ns))
        partial.replace(target)
