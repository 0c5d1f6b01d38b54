"""The inputs of planning: the lock, layers, pull requests, the index, and the base."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.forge import Forges, PullStore, parse_pull
from builder.common.model.reference import Ref
from builder.common.pypi import PackageIndex
from builder.compile.changes import image_of
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.layers.catalog import Catalog, Selection
from builder.layers.lock.document import LockEntry, Request
from builder.layers.lock.entry import differences, entry_of, layer_differences, stale, wheels_of
from builder.layers.lock.facts import LockedFacts
from builder.layers.lock.file import NAME, Lock, lock_path, read_lock
from builder.layers.plan.planner import make_plan
from builder.layers.plan.sources import IndexSources
from builder.layers.pulls.report import report_pulls
from builder.layers.pulls.resolve import Resolver
from builder.pipeline import bases
from builder.pipeline.options import PlanOptions, toolkit_choice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.common.documents.pulls import Pin
    from builder.common.model.plan import BuildPlan
    from builder.compile.executor import ToolkitChoice
    from builder.compile.stage import Stages
    from builder.images.rootfs.base import Base

    Identify = Callable[[Ref], Base]

#: Stands for the base's own platform or Python in a request.
_OWN = "own"


def stages_of(
    index: PackageIndex,
    forges: Forges | None = None,
    nvcc: str | None = None,
    toolkit: ToolkitChoice | None = None,
) -> Stages:
    """The compile stages that are allowed; ``nvcc`` and ``toolkit`` override the defaults."""
    from builder.compile.stage import Stages

    return Stages(index, forges, nvcc, toolkit)


def _libraries() -> tuple[str, ...]:
    from builder.compile.abi import DISTRIBUTIONS

    return DISTRIBUTIONS


class Inputs:
    """The inputs of a plan: selected layers, pull requests, the index, the project's lock."""

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self.layers = options.names
        self.with_pr = tuple(str(parse_pull(text)) for text in options.with_pr)
        self.locked = options.locked
        self.request: Request | None = None
        self.entry: LockEntry | None = None
        self.path = lock_path(Path.cwd())
        self.lock = None if options.upgrade else read_lock(self.path)
        self.facts = LockedFacts(self.lock, strict=self.locked)
        self.catalog = Catalog.discover(options.patches)
        self.index = PackageIndex(refresh=options.refresh)
        forges = Forges(options.forge_clone)
        toolkit = toolkit_choice(options.toolkit, options.builder)
        self.stages = (
            stages_of(self.index, forges, toolkit=toolkit) if options.compile_here else None
        )
        self.sources = IndexSources(self.index, self.stages)
        self._refuse_unlocked()
        chosen = self.catalog.select(self.layers) if self.layers else Selection((), ())
        store = PullStore(forges)
        resolver = Resolver(store, self.index, self._held_pins())
        self.resolved = resolver.resolve(chosen, options.with_pr)
        self.selection = self.resolved.selection

    def _held_pins(self) -> Mapping[str, Pin]:
        return self.lock.pulls if self.lock else {}

    def _refuse_unlocked(self) -> None:
        if not self.locked:
            return
        if self.lock is None:
            raise self._not_locked(f"--locked, and there is no {NAME} ({self.path})")
        missing = [request for request in self.with_pr if request not in self.lock.pulls]
        if missing:
            raise self._not_locked(f"{self.path} has no entry for {', '.join(missing)}")

    def _not_locked(self, message: str) -> SparkBuildError:
        return SparkBuildError(message, Exit.STALE, hint=self.lock_command)

    @property
    def lock_command(self) -> str:
        """The command that locks this request."""
        words = ["spark-build", "lock", *self._named()]
        words += ["--base", self.request.base] if self.request else []
        return shlex.join(words)

    def _named(self) -> list[str]:
        """The options for layers and pull requests."""
        words = ["--layers", ",".join(self.layers)] if self.layers else []
        return [*words, *(word for request in self.with_pr for word in ("--with-pr", request))]

    # -- the base

    def base_ref(self, engine: str = "auto", *, pull: bool = False) -> Ref:
        """The base to plan for: the given one, with ``--locked`` the locked one, else the default.

        Raises:
            UsageError: there is no default, or several bases are locked.
        """
        if self._options.base_ref:
            return self._options.base_ref
        if self.locked and self.lock:
            asked = Request(
                layers=self.layers, with_pr=self.with_pr, base="", platform="", python=""
            )
            names = {entry.request.base for entry in self.lock.of_layers(asked)}
            if len(names) > 1:
                raise UsageError(
                    f"{self.path} locks several bases for these layers: {', '.join(sorted(names))}",
                    hint="--base",
                )
            if names:
                return Ref(names.pop())
        return bases.default_base(self.selection, engine, pull=pull)

    def identify(
        self,
        ref: Ref,
        *,
        platform: str | None = None,
        engine: str = "auto",
        locking: bool = False,
    ) -> Base:
        """Identify a base, with facts from the lock if it has any.

        ``platform`` replaces the one in the options.  When ``locking``, as with ``--locked``,
        a moved tag means the locked image, and reads of the base are
        noted.

        Raises:
            RemoteError: the locked image no longer exists.
        """
        platform = platform or self._options.platform
        python, site_packages = self._options.python, self._options.site_packages
        for name, value in (("--python", python), ("--site-packages", site_packages)):
            if value is not None and not ref.kind.is_wheels:
                raise UsageError(
                    f"{name} applies only to a pypi: base; {ref} already determines it",
                    hint=f"leave {name} out",
                )
        self.request = Request(
            layers=self.layers,
            with_pr=self.with_pr,
            base=ref.text,
            platform=platform or ("linux/arm64" if ref.kind.is_wheels else _OWN),
            python=python or ("3.12" if ref.kind.is_wheels else _OWN),
        )
        self.entry = self.lock.entries.get(self.request.key) if self.lock else None
        pins: Mapping[str, str] = {}
        if self.entry:
            self.index.hold(wheels_of(self.entry))
            pins = self.entry.base.packages

        def identified(name: Ref) -> Base:
            return bases.identify_base(
                name,
                self.selection,
                self.index,
                platform=platform,
                python=python,
                site_packages=site_packages,
                engine=engine,
                pins=pins,
                libraries=_libraries() if self.stages else (),
                facts_of=self.facts.of,
                noting=locking,
            )

        base = identified(ref)
        if self.entry and base.identity.is_image:
            wanted = self.entry.base.digest
            if base.identity.digest != wanted:
                if not (self.locked or locking):
                    console.warn(
                        f"{ref} moved from {wanted[:19]} (locked) to {base.identity.digest[:19]}; "
                        "using the new one (--locked uses the locked one)"
                    )
                    return base
                base.close()
                return self._pinned(ref, wanted, identified)
        return base

    @staticmethod
    def _pinned(ref: Ref, digest: str, identified: Identify) -> Base:
        """The locked image of a moved tag: by its registry digest, else by its ID."""
        said = ""
        for name in (ref.at(digest), Ref(digest)):
            try:
                base = identified(name)
            except SparkBuildError as error:
                said = said or str(error)
                continue
            if base.identity.digest == digest:
                console.say(f"  {ref} moved; using {digest[:19]}, as locked")
                return base
            base.close()
        raise RemoteError(
            f"{ref} is locked at {digest}, which is no longer available: {said}; lock the image "
            "that the tag names now",
            hint="spark-build lock --upgrade",
        )

    # -- the plan

    @property
    def elsewhere(self) -> bool:
        """Whether units are compiled on another machine."""
        return self.stages is not None and self.stages.elsewhere

    def refuse_stages(self, plan: BuildPlan) -> None:
        """Refuse, before anything starts, compile stages that are too large for this machine.

        Raises:
            EngineError: memory or disk space is too small (exit 6).
        """
        for stage in plan.stages:
            assert self.stages is not None
            self.stages.refuse_small(stage)

    def plan(self, base: Base) -> BuildPlan:
        """The plan, with a report on each pull request, checked against the lock.

        Raises:
            SparkBuildError: the lock is stale, with ``--locked`` (exit 9).
        """
        plan = self.unchecked_plan(base)
        if self.lock and self.request and (self.locked or self.entry):
            problem = self.problem(plan, self.lock, self.request)
            if problem and self.locked:
                raise problem
            if problem:
                console.warn(f"{problem}\n  try: {problem.hint}")
        return plan

    def compiled(self, plan: BuildPlan, base: Base) -> BuildPlan:
        """The plan with the results of its compile stages, which run if they are not cached.

        Raises:
            EngineError: this machine is too small for them.
            BuildFailed: a unit does not compile.
        """
        if not plan.pending:
            return plan
        assert self.stages is not None
        with console.step("compile"):
            for stage in plan.stages:
                self.stages.run(stage, base)
        return self.plan(base)

    def stage_dockerfiles(self, plan: BuildPlan) -> str:
        """The Dockerfiles of pending compile stages, as text."""
        if self.stages is None:
            return ""
        return "".join(map(self.stages.dockerfile, plan.stages))

    def rebuild_command(self, command: str, base: Ref) -> str:
        """The user's command line with ``--compile``.

        For arm64 the package index may have only a CPU build of torch, unlike the image.
        """
        platform = self.request.platform if self.request else _OWN
        wheels = re.match(r"vllm==([^,]+)", base.place) if base.kind.is_wheels else None
        if wheels and platform == "linux/arm64":
            base = Ref(image_of(wheels[1]))
        words = self._named()
        words += [] if base.kind.is_installed else ["--base", base.text]
        words += ["--platform", platform] if platform not in (_OWN, "linux/arm64") else []
        return f"spark-build {command} {shlex.join([*words, '--compile'])}"

    def unchecked_plan(self, base: Base) -> BuildPlan:
        """The plan, with a report on each pull request."""
        plan = make_plan(
            base, self.selection, self.sources, single_layer=self._options.single_layer
        )
        if not self.resolved.pulled:
            return plan
        rejected_diffs = self.stages.rejected_diffs if self.stages else {}
        reports = report_pulls(plan, base, self.resolved.pulled, self.index, rejected_diffs)
        told = [hint for report in reports for hint in report.hints]
        return dataclasses.replace(
            plan,
            pulls=tuple(reports),
            hints=(*plan.hints, *told),
        )

    def entry_for(self, plan: BuildPlan) -> LockEntry:
        """The lock entry for a plan."""
        assert self.request is not None
        return entry_of(self.request, plan, self.catalog.folders, self.index)

    def problem(self, plan: BuildPlan, lock: Lock, request: Request) -> SparkBuildError | None:
        """The error if the lock is stale for a plan, or None."""
        made = self.entry_for(plan)
        if plan.base.is_installed:  # an installed environment is no input: its layers are
            found = [
                layer_differences(entry.layers, made.layers) for entry in lock.of_layers(request)
            ]
        else:
            entry = lock.entries.get(request.key)
            found = [differences(entry, made)] if entry else []
        if not found:
            return self._not_locked(f"{self.path} has no entry for {request.key}")
        least = min(found, key=len)
        return stale(self.path, least) if least else None
