"""The inputs of planning: the lock, layers, pull requests, the index, and the base."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref, image_of
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.layers.catalog import Catalog, Selection, has_pulls
from builder.layers.judged import judged
from builder.layers.lock import (
    NAME,
    Lock,
    LockedFacts,
    LockEntry,
    Request,
    differences,
    entry_of,
    layer_differences,
    lock_path,
    read_lock,
    stale,
    wheels_of,
)
from builder.layers.pinned import IndexSources
from builder.layers.planner import make_plan
from builder.pipeline import bases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.applier.judging import Step
    from builder.common.forge import Forges
    from builder.common.plan import BuildPlan, Pin
    from builder.compile.executor import ToolkitChoice
    from builder.compile.stage import Stages
    from builder.images.subject import Subject
    from builder.layers.pulls import Pulled
    from builder.pipeline.options import PlanOptions

    Identify = Callable[[Ref], Subject]

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
    from builder.compile.link import DISTRIBUTIONS

    return DISTRIBUTIONS


def inputs_of(options: PlanOptions) -> Inputs:
    """Read the project's lock, select the layers, and get the pull requests.

    Raises:
        SparkBuildError: the lock lacks something, with ``--locked`` (exit 9).
        RemoteError: the forge or the package index does not respond.
    """
    path = lock_path(Path.cwd())
    lock = None if options.upgrade else read_lock(path)
    catalog = Catalog.discover(options.patches)
    index = PackageIndex(refresh=options.refresh)
    stages = _allowed_stages(options, index) if options.compile_here else None
    if options.locked:
        _refuse_unlocked(options, lock, path)
    selection = catalog.select(options.names) if options.names else Selection((), ())
    pulled: Mapping[str, list[Pulled]] = {}
    pins: Mapping[str, Pin] = {}
    if options.with_pr or not selection.layers or any(map(has_pulls, selection.layers)):
        from builder.common.forge import Forges, PullStore
        from builder.layers.pulls import Resolver

        store = PullStore(Forges(options.forge_clone))
        resolver = Resolver(store, index, lock.pulls if lock else {})
        resolved = resolver.resolve(selection, options.with_pr)
        selection, pulled, pins = resolved.selection, resolved.pulled, resolved.pins
    return Inputs(
        options=options,
        path=path,
        lock=lock,
        facts=LockedFacts(lock, strict=options.locked),
        catalog=catalog,
        selection=selection,
        pulled=pulled,
        pins=pins,
        index=index,
        stages=stages,
        sources=IndexSources(index, stages),
    )


def _allowed_stages(options: PlanOptions, index: PackageIndex) -> Stages:
    from builder.common.forge import Forges

    toolkit = None
    if options.toolkit:
        from builder.compile.toolkit import toolkit_choice

        toolkit = toolkit_choice(options.toolkit, options.builder)
    return stages_of(index, Forges(options.forge_clone), toolkit=toolkit)


def pull_requests(options: PlanOptions) -> tuple[str, ...]:
    """The pull requests and commits, in their canonical form."""
    if not options.with_pr:
        return ()
    from builder.common.forge import parse_pull

    return tuple(str(parse_pull(text)) for text in options.with_pr)


def _refuse_unlocked(options: PlanOptions, lock: Lock | None, path: Path) -> None:
    if lock is None:
        raise _not_locked(f"--locked, and there is no {NAME} ({path})", options)
    missing = [request for request in pull_requests(options) if request not in lock.pulls]
    if missing:
        raise _not_locked(f"{path} has no entry for {', '.join(missing)}", options)


def _not_locked(message: str, options: PlanOptions, base: str = "") -> SparkBuildError:
    """The error for what is not locked, with the command that locks it."""
    words = ["spark-build", "lock", *_named(options), *(("--base", base) if base else ())]
    return SparkBuildError(message, Exit.STALE, hint=shlex.join(words))


def _named(options: PlanOptions) -> list[str]:
    """The options for layers and pull requests."""
    words = ["--layers", ",".join(options.names)] if options.names else []
    return [*words, *(w for request in pull_requests(options) for w in ("--with-pr", request))]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a plan is made from, besides its base; :func:`inputs_of` reads it."""

    options: PlanOptions
    #: the project's lock, if there is one and it is to be looked at
    path: Path
    lock: Lock | None
    facts: LockedFacts
    catalog: Catalog
    #: the layers and profiles, with those of pull requests
    selection: Selection
    #: the pull requests by layer
    pulled: Mapping[str, list[Pulled]]
    #: the pins of those from the command line, by request
    pins: Mapping[str, Pin]
    index: PackageIndex
    #: the compile stages that are allowed
    stages: Stages | None
    sources: IndexSources

    @property
    def locked(self) -> bool:
        """Whether the lock must be current."""
        return self.options.locked

    def asked(self, base: str = "", platform: str = "", python: str = "") -> Request:
        """The request, as the lock has it."""
        return Request(
            layers=self.options.names,
            with_pr=pull_requests(self.options),
            base=base,
            platform=platform,
            python=python,
        )

    def base_ref(self, in_engine: bool | None = None, *, pull: bool = False) -> Ref:
        """The base to plan for: the given one, with ``--locked`` the locked one, else the default.

        Raises:
            UsageError: there is no default, or several bases are locked.
        """
        if self.options.base_ref:
            return self.options.base_ref
        if self.locked and self.lock:
            names = {entry.request.base for entry in self.lock.of_layers(self.asked())}
            if len(names) > 1:
                raise UsageError(
                    f"{self.path} locks several bases for these layers: {', '.join(sorted(names))}",
                    hint="--base",
                )
            if names:
                return Ref(names.pop())
        return bases.default_base(self.selection, in_engine, pull=pull)

    def identify(
        self,
        ref: Ref,
        *,
        platform: str | None = None,
        in_engine: bool | None = None,
        locking: bool = False,
    ) -> Planning:
        """Identify a base to plan for, with facts from the lock if it has any.

        ``platform`` replaces the one in the options.  When ``locking``, as with ``--locked``,
        a moved tag means the locked image, and reads of the base are
        noted.

        Raises:
            RemoteError: the locked image no longer exists.
        """
        platform = platform or self.options.platform
        python, site_packages = self.options.python, self.options.site_packages
        for name, value in (("--python", python), ("--site-packages", site_packages)):
            if value is not None and not ref.kind.is_wheels:
                raise UsageError(
                    f"{name} applies only to a pypi: base; {ref} already determines it",
                    hint=f"leave {name} out",
                )
        request = self.asked(
            base=ref.text,
            platform=platform or ("linux/arm64" if ref.kind.is_wheels else _OWN),
            python=python or ("3.12" if ref.kind.is_wheels else _OWN),
        )
        entry = self.lock.entries.get(request.key) if self.lock else None
        pins: Mapping[str, str] = {}
        if entry:
            self.index.hold(wheels_of(entry))
            pins = entry.base.packages

        def identified(name: Ref) -> Subject:
            return bases.identify_base(
                name,
                self.selection,
                self.index,
                platform=platform,
                python=python,
                site_packages=site_packages,
                in_engine=in_engine,
                pins=pins,
                libraries=_libraries() if self.stages else (),
                facts_of=self.facts.of,
                noting=locking,
            )

        base = identified(ref)
        if entry and base.identity.is_image and base.identity.digest != entry.base.digest:
            wanted = entry.base.digest
            if self.locked or locking:
                base.close()
                base = _pinned(ref, wanted, identified)
            else:
                console.warn(
                    f"{ref} moved from {wanted[:19]} (locked) to {base.identity.digest[:19]}; "
                    "using the new one (--locked uses the locked one)"
                )
        return Planning(
            inputs=self, ref=ref, base=base, request=request, entry=entry, noting=locking
        )


def _pinned(ref: Ref, digest: str, identified: Identify) -> Subject:
    """The locked image of a moved tag: by its registry digest, else by its ID."""
    problem = ""
    for name in (ref.at(digest), Ref(digest)):
        try:
            base = identified(name)
        except SparkBuildError as error:
            problem = problem or str(error)
            continue
        if base.identity.digest == digest:
            console.say(f"  {ref} moved; using {digest[:19]}, as locked")
            return base
        base.close()
    raise RemoteError(
        f"{ref} is locked at {digest}, which is no longer available: {problem}; lock the image "
        "that the tag names now",
        hint="spark-build lock --upgrade",
    )


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A base, and what is planned for it; ``close`` closes the base."""

    inputs: Inputs
    #: the base as it was named
    ref: Ref
    base: Subject
    request: Request
    #: its entry in the lock, if it has one
    entry: LockEntry | None
    #: whether reads of the base are noted, for a lock
    noting: bool = False

    def close(self) -> None:
        """Close the base."""
        self.base.close()

    @property
    def elsewhere(self) -> bool:
        """Whether units are compiled on another machine."""
        return self.inputs.stages is not None and self.inputs.stages.elsewhere

    def refuse_stages(self, plan: BuildPlan) -> None:
        """Refuse, before anything starts, compile stages that are too large for this machine.

        Raises:
            EngineError: memory or disk space is too small (exit 6).
        """
        for stage in plan.stages:
            assert self.inputs.stages is not None
            self.inputs.stages.refuse_small(stage)

    def plan(self) -> BuildPlan:
        """The plan, with a report on each pull request, checked against the lock.

        Raises:
            SparkBuildError: the lock is stale, with ``--locked`` (exit 9).
        """
        plan = self.unchecked_plan()
        if self.inputs.lock and (self.inputs.locked or self.entry):
            problem = self.problem(plan, self.inputs.lock)
            if problem and self.inputs.locked:
                raise problem
            if problem:
                console.warn(f"{problem}\n  try: {problem.hint}")
        return plan

    def compiled(self, plan: BuildPlan) -> BuildPlan:
        """The plan with the results of its compile stages, which run if they are not cached.

        Raises:
            EngineError: this machine is too small for them.
            BuildFailed: a unit does not compile.
        """
        if not plan.pending:
            return plan
        assert self.inputs.stages is not None
        with console.step("compile"):
            for stage in plan.stages:
                self.inputs.stages.run(stage, self.base)
        return self.plan()

    def stage_dockerfiles(self, plan: BuildPlan) -> str:
        """The Dockerfiles of pending compile stages, as text."""
        if self.inputs.stages is None:
            return ""
        return "".join(map(self.inputs.stages.dockerfile, plan.stages))

    def rebuild_command(self, command: str) -> str:
        """The user's command line with ``--compile``.

        For arm64 the package index may have only a CPU build of torch, unlike the image.
        """
        platform, base = self.request.platform, self.ref
        wheels = re.match(r"vllm==([^,]+)", base.place) if base.kind.is_wheels else None
        if wheels and platform == "linux/arm64":
            base = Ref(image_of(wheels[1]))
        words = _named(self.inputs.options)
        words += [] if base.kind.is_installed else ["--base", base.text]
        words += ["--platform", platform] if platform not in (_OWN, "linux/arm64") else []
        return f"spark-build {command} {shlex.join([*words, '--compile'])}"

    def unchecked_plan(self) -> BuildPlan:
        """The plan, with a report on each pull request."""
        plan = make_plan(
            self.base,
            self.inputs.selection,
            self.inputs.sources,
            single_layer=self.inputs.options.single_layer,
            steps=self._known_steps(),
        )
        if not self.inputs.pulled:
            return plan
        from builder.layers.pulls import report_pulls

        rejected_diffs = self.inputs.stages.rejected_diffs if self.inputs.stages else {}
        reports = report_pulls(
            plan, self.base, self.inputs.pulled, self.inputs.index, rejected_diffs
        )
        told = [hint for report in reports for hint in report.hints]
        return dataclasses.replace(
            plan,
            pulls=tuple(reports),
            hints=(*plan.hints, *told),
        )

    def _known_steps(self) -> list[Step] | None:
        """How the layers were judged on this base before.

        A lock notes what judging reads, and compile stages and pull requests are judged with more
        than the base; they are judged each time.
        """
        base, inputs = self.base, self.inputs
        by_digest = base.identity.is_wheels or base.in_layers is not None
        if not by_digest or self.noting or inputs.lock or inputs.stages or inputs.pulled:
            return None
        packages = base.identity.packages if base.identity.is_wheels else ()
        indexes = {name: inputs.index.key_of(name) for name in packages}
        return judged(base, inputs.selection.layers, inputs.sources, indexes)

    def entry_for(self, plan: BuildPlan) -> LockEntry:
        """The lock entry for a plan."""
        return entry_of(self.request, plan, self.inputs.catalog.folders, self.inputs.index)

    def problem(self, plan: BuildPlan, lock: Lock) -> SparkBuildError | None:
        """The error if the lock is stale for a plan, or None."""
        fresh = self.entry_for(plan)
        if plan.base.is_installed:  # an installed environment is no input: its layers are
            changes = [
                layer_differences(entry.layers, fresh.layers)
                for entry in lock.of_layers(self.request)
            ]
        else:
            entry = lock.entries.get(self.request.key)
            changes = [differences(entry, fresh)] if entry else []
        if not changes:
            message = f"{self.inputs.path} has no entry for {self.request.key}"
            return _not_locked(message, self.inputs.options, self.request.base)
        least = min(changes, key=len)
        return stale(self.inputs.path, least) if least else None
