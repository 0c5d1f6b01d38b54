"""What ``verify`` holds a target against: layers, pull requests, and the project's lock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cli.inputs import Inputs
from builder.errors import Exit, SparkBuildError
from builder.index import PackageIndex
from builder.lock import NAME, lock_path, read_lock
from builder.lockentry import plan_differences, stale, wheels_of
from builder.lockfacts import LockedFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.catalog import Selection
    from builder.cli.options import PullOptions


class TargetInputs:
    """A selection, where one was named, and the lock."""

    def __init__(
        self,
        layers: Sequence[str] | None,
        patches: Sequence[Path] | None,
        pulls: PullOptions,
        *,
        refresh: bool,
    ) -> None:
        self._locked = pulls.locked
        self._path = lock_path(Path.cwd())
        self._lock = read_lock(self._path) if pulls.locked else None
        if pulls.locked and self._lock is None:
            raise SparkBuildError(
                f"--locked, and there is no {NAME} ({self._path})",
                Exit.STALE,
                hint="spark-build lock --layers L --base BASE",
            )
        self.facts = (
            LockedFacts(self._lock, strict=True) if pulls.locked else LockedFacts.beside(self._path)
        )
        self.selection: Selection | None = None
        if layers or pulls.with_pr:
            inputs = Inputs(layers, patches, pulls, refresh=refresh)
            self.selection, self.index = inputs.selection, inputs.index
        else:
            self.index = PackageIndex(refresh=refresh)
        for entry in self._lock.entries.values() if self._lock else ():
            self.index.hold(wheels_of(entry))

    def check(self, plan: Mapping[str, Any]) -> None:
        """Hold a target's plan against the lock, with ``--locked``.

        Raises:
            SparkBuildError: no entry of the lock is what the target was made of (exit 9).
        """
        if self._lock is None:
            return
        found = [plan_differences(entry, plan) for entry in self._lock.entries.values()]
        if not found:
            raise SparkBuildError(
                f"{self._path} locks nothing", Exit.STALE, hint="spark-build lock"
            )
        least = min(found, key=len)
        if least:
            raise stale(self._path, least)
