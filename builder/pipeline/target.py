"""What ``verify`` compares a target with: layers, pull requests, and the project's lock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import Exit, SparkBuildError
from builder.lock.entry import plan_differences, stale, wheels_of
from builder.lock.facts import LockedFacts
from builder.lock.file import NAME, lock_path, read_lock
from builder.pipeline.inputs import Inputs
from builder.pypi.index import PackageIndex

if TYPE_CHECKING:
    from builder.documents.plan import PlanDocument
    from builder.layers.catalog import Selection
    from builder.pipeline.options import PlanOptions


class TargetInputs:
    """A selection, where one was named, and the lock."""

    def __init__(self, options: PlanOptions) -> None:
        self._path = lock_path(Path.cwd())
        self._lock = read_lock(self._path) if options.locked else None
        if options.locked and self._lock is None:
            raise SparkBuildError(
                f"--locked, and there is no {NAME} ({self._path})",
                Exit.STALE,
                hint="spark-build lock --layers L --base BASE",
            )
        self.facts = (
            LockedFacts(self._lock, strict=True)
            if options.locked
            else LockedFacts.beside(self._path)
        )
        self.selection: Selection | None = None
        if options.names or options.with_pr:
            inputs = Inputs(options)
            self.selection, self.index = inputs.selection, inputs.index
        else:
            self.index = PackageIndex(refresh=options.refresh)
        for entry in self._lock.entries.values() if self._lock else ():
            self.index.hold(wheels_of(entry))

    def check(self, plan: PlanDocument) -> None:
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
