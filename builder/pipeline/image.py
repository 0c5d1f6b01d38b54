"""Builds images, from options to evidence: identify, plan, compile, build, verify."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from msgspec import Meta
from msgspec.structs import asdict

from builder.applier.values import canonical_json, sha256_hex
from builder.common.background import in_background
from builder.common.console import console
from builder.common.diskspace import check_room
from builder.common.document import Count, Digest, Document, Part, Seconds, Text, always
from builder.common.plan import PlanDocument, State, default_tag
from builder.common.reference import Ref
from builder.errors import (
    EngineError,
    Exit,
    NotServed,
    RemoteError,
    SparkBuildError,
    UsageError,
    did_you_mean,
)
from builder.images.engines.buildx import cache_words, check_name
from builder.images.engines.choice import (
    AUTO,
    ENGINES,
    check_docker_host,
    engine_for,
    named,
    reads_in_engine,
    wanted_engine,
)
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import IndexRequest, OciEngine, build_index, write_dockerfile
from builder.images.engines.runcommands import RunBlock, run_commands
from builder.images.registry.copy import Locations, layout_place
from builder.images.registry.layout import check_layout_target as check_folder
from builder.images.registry.model import is_index, platform_name
from builder.images.registry.reference import is_digest
from builder.images.rootfs.image import PREFERRED, image_entries, platform_of, subjects
from builder.layers.planner import refuse_nothing, refuse_plan
from builder.pipeline.inputs import inputs_of
from builder.pipeline.show import show_plan
from builder.proof.checks import Check
from builder.proof.report import ReportDocument, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.common.diskspace import Need
    from builder.common.plan import BuildPlan
    from builder.images.engines.choice import EngineKind
    from builder.images.engines.model import BuiltImage, Engine
    from builder.images.engines.oci import BuiltIndex
    from builder.images.engines.runcommands import RunCommands
    from builder.images.subject import Subject
    from builder.pipeline.imageoptions import ImageOptions
    from builder.pipeline.inputs import Inputs, Planning
    from builder.proof.report import Report


# --------------------------------------------------------------------------------------- documents

Timings = Annotated[dict[str, Seconds], Meta(description="seconds by step")]
Plans = Annotated[tuple[PlanDocument, ...], Meta(min_length=1, description="one plan a platform")]


class BuiltLayer(Part, frozen=True, kw_only=True):
    """A layer of the plan."""

    name: Text
    state: State
    cached: Annotated[
        bool | None,
        Meta(
            description="of a layer that was applied: whether it was reused from an earlier build"
        ),
    ] = None


class PlatformLayer(BuiltLayer, frozen=True, kw_only=True):
    """A layer of the plan for one platform."""

    platform: Text


class NotVerified(Part, frozen=True, kw_only=True):
    """The placeholder for evidence that was not requested."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "allOf": [{"properties": {"passed": {"const": False}, "checks": {"maxItems": 0}}}]
    }

    passed: bool = always(False)
    checks: tuple[Check, ...] = always(())
    not_run: Count = always(1)


class PlatformsVerified(Part, frozen=True, kw_only=True):
    """The evidence on each platform."""

    passed: bool
    checks: tuple[Check, ...]
    verdicts: Annotated[dict[str, Verdict], Meta(description="one a platform")]


class Built(Document, frozen=True, kw_only=True):
    """What was built."""

    plan_digest: Digest
    image: Text
    digest: Digest
    engine: Text
    added_bytes: Count
    timings: Timings
    run: RunBlock


class ImageDocument(Built, frozen=True, kw_only=True):
    """An image that was built."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "allOf": [{"properties": {"overlay": {"const": True}}}]
    }

    layers: tuple[BuiltLayer, ...]
    overlay: Annotated[bool, Meta(description="only the changed files; cannot run alone")] = False


class VerifiedImage(ImageDocument, frozen=True, kw_only=True):
    """An image that was built and verified."""

    verify: ReportDocument


class UnverifiedImage(ImageDocument, frozen=True, kw_only=True):
    """An image that was built without verification."""

    verify: NotVerified


class IndexDocument(Built, frozen=True, kw_only=True):
    """An index that was built, with a plan for each entry."""

    plans: Plans
    layers: tuple[PlatformLayer, ...]
    verify: PlatformsVerified


class IndexPlans(Document, frozen=True, kw_only=True):
    """The plans of an index, with --dry-run."""

    plan_digest: Digest
    plans: Plans
    timings: Timings


class DockerfileText(Document, frozen=True, kw_only=True):
    """The document of ``image --print-dockerfile``."""

    plan_digest: Digest
    dockerfile: Text


# ----------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class PlatformPlan:
    """One platform's open base, and its plan."""

    platform: str
    planning: Planning
    plan: BuildPlan

    @property
    def base(self) -> Subject:
        """The open base."""
        return self.planning.base


def plans_digest(entries: Sequence[PlatformPlan]) -> str:
    """One digest for all plans of an index."""
    plans = [[entry.platform, entry.plan.digest] for entry in entries]
    return f"sha256:{sha256_hex(canonical_json(plans))}"


def _layers(entry: PlatformPlan, built: BuiltImage) -> Iterator[BuiltLayer]:
    """Name and state of each layer, and whether an applied one came from the cache."""
    platform = entry.plan.base.platform.oci
    for decision in entry.plan.decisions:
        state = cast("State", decision.outcome.state)
        cached = built.cached.get((platform, decision.name))
        yield BuiltLayer(name=decision.name, state=state, cached=cached)


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A built image or index, and the evidence for each platform.

    ``reports`` is empty without verification.
    """

    entries: tuple[PlatformPlan, ...]
    built: BuiltImage
    reports: tuple[Report, ...]
    #: seconds by step
    timings: Mapping[str, float]
    started: RunCommands
    is_index: bool = False

    @property
    def failed(self) -> list[Report]:
        """Reports of platforms that did not pass."""
        return [report for report in self.reports if not report.passed()]

    @property
    def passed(self) -> bool:
        """Whether every platform was verified and passed."""
        return bool(self.reports) and not self.failed

    def document(self) -> VerifiedImage | UnverifiedImage | IndexDocument:
        """The document of ``image --json``."""
        plan = self.entries[0].plan
        image = Built(
            plan_digest=plans_digest(self.entries) if self.is_index else plan.digest,
            image=self.built.ref.text,
            digest=self.built.digest,
            engine=self.built.engine,
            added_bytes=self.built.added_bytes,
            timings={name: round(seconds, 3) for name, seconds in self.timings.items()},
            run=self.started.block,
        )
        common = asdict(image)
        if self.is_index:
            return IndexDocument(
                **common,
                plans=tuple(entry.plan.document for entry in self.entries),
                layers=tuple(
                    PlatformLayer(**asdict(layer), platform=entry.platform)
                    for entry in self.entries
                    for layer in _layers(entry, self.built)
                ),
                verify=self._platforms(),
            )
        overlay = plan.base.is_wheels
        layers = tuple(_layers(self.entries[0], self.built))
        if not self.reports:
            return UnverifiedImage(**common, layers=layers, overlay=overlay, verify=NotVerified())
        report = self.reports[0].document()
        return VerifiedImage(**common, layers=layers, overlay=overlay, verify=report)

    def _platforms(self) -> PlatformsVerified:
        pairs = zip(self.entries, self.reports, strict=False)
        return PlatformsVerified(
            passed=self.passed,
            checks=tuple(check for report in self.reports for check in report.checks),
            verdicts={entry.platform: report.verdict() for entry, report in pairs},
        )

    def refuse_failed(self) -> None:
        """Raise if verification failed.

        Raises:
            SparkBuildError: a check failed; the image exists (exit 5).
        """
        if not self.failed:
            return
        if self.is_index:
            names = [report.target for report in self.failed]
            message = f"verification failed for {', '.join(names)}"
            target = names[0]
        else:
            checks = self.failed[0].of("fail")
            message = "verification failed: " + "; ".join(
                f"{check.name}: expected {check.expected!r}, seen {check.seen!r}"
                for check in checks
            )
            target = self.built.subject.text
        raise SparkBuildError(
            f"{self.built.pinned} was built, but {message}",
            Exit.VERIFY_FAILED,
            hint=f"spark-build verify {shlex.quote(target)}",
        )


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Add the duration of a successful block to its step."""
    began = time.monotonic()
    yield
    timings[name] = timings.get(name, 0.0) + time.monotonic() - began


# ------------------------------------------------------ where an image is built, and where it goes
#
# The options ``--builder``, ``--cache-from``, ``--cache-to``, ``--tag``, ``--output``, ``--push``.

_TAG = re.compile(r"[a-z0-9][a-zA-Z0-9._/:-]*")


@dataclass(frozen=True)
class Destination:
    """Where an image goes: its name, a directory for a layout, or a registry."""

    tag: str
    output: Path | None
    push: bool


def check_destination(options: ImageOptions, engine: str) -> Destination:
    """Check ``--tag``, ``--output`` and ``--push`` as far as possible without a base.

    Raises:
        UsageError: they contradict each other, have no effect, or the engine does not support them.
    """
    kind = named(engine)
    output = options.output or ("docker" if kind is not None and kind.through_docker else "")
    layout = Ref(output)
    push = options.push or output == "registry"
    if output not in ("", "docker", "registry") and not layout.in_layout:
        near = f"oci:{output}" if "/" in output or Path(output).is_dir() else "oci:DIR"
        raise UsageError(
            f"--output {output!r} is not docker, oci:DIR or registry", hint=f"--output {near}"
        )
    folder: Path | None = None
    name = ""
    if layout.in_layout:
        folder, name = layout_place(layout)
        check_folder(folder.absolute())
    if is_digest(name):
        raise UsageError(
            f"--output {output!r}: give a name without a digest, which is known after the build"
        )
    if name and options.tag not in (None, name):
        raise UsageError(
            f"--output {output!r} and --tag {options.tag!r} are two names; give only one"
        )
    tag = options.tag or name
    if tag and not _TAG.fullmatch(tag):
        raise UsageError(f"--tag {tag!r} is not an image name")
    _refuse_contradictions(options, kind, layout, push=push)
    return Destination(tag, folder, push)


def _refuse_contradictions(
    options: ImageOptions, kind: EngineKind | None, output: Ref, *, push: bool
) -> None:
    alone = kind is None or kind.writes_manifests
    if kind is not None and not alone and output.in_layout and not options.builder:
        raise UsageError(
            f"--output {output.text!r} is not an output of the {kind.name} engine",
            hint=f"--engine oci --output {output}",
        )
    if push and output.in_layout:
        raise UsageError("--push and --output oci:DIR are two places; give only one")
    if push and options.tag is None:
        raise UsageError("no destination to push to", hint="--tag HOST/NAME:TAG")
    if options.thin and (not alone or push or output.text == "docker"):
        raise UsageError(
            "--thin applies to an OCI layout, and none is written",
            hint="--output oci:DIR",
        )
    if options.plan.single_layer and not alone:
        raise UsageError("--single-layer is for the oci engine", hint="--engine oci")


def check_base_options(options: ImageOptions, ref: Ref) -> None:
    """Refuse options that do not apply to this kind of base.

    Raises:
        UsageError: an option is for another kind of base.
    """
    if options.thin and ref.kind.is_wheels:
        raise UsageError(
            "--thin leaves the base's blobs out, but released wheels have none",
            hint="leave --thin out",
        )


def destination_of(plan: BuildPlan, options: ImageOptions, engine: str) -> Destination:
    """The destination from ``--tag``, ``--output`` and ``--push``.

    Raises:
        UsageError: as for :func:`check_destination`.
    """
    place = check_destination(options, engine)
    folder = place.output
    alone = ENGINES[engine].writes_manifests
    if folder is None and alone and not place.push and options.output != "docker":
        vllm = plan.base.packages.get("vllm", "unknown")
        folder = Path(f"spark-build-{plan.name}-{vllm}")
    return Destination(place.tag or default_tag(plan), folder, place.push)


def check_builder(options: ImageOptions) -> None:
    """Check the options before anything is read.

    Raises:
        UsageError: the options contradict each other, or one is malformed.
    """
    if options.builder:
        check_name(options.builder)
    cache_words(options.cache_from, "from")
    cache_words(options.cache_to, "to")
    asked = {
        "--builder": options.builder,
        "--cache-from": options.cache_from,
        "--cache-to": options.cache_to,
    }
    given = next((name for name, value in asked.items() if value), None)
    if given is None:
        return
    kind = named(options.engine)
    if kind is not None and not kind.has_builders:
        raise UsageError(
            f"{given} is for the buildkit engine; the {kind.name} engine has its own layer cache",
            hint="--engine buildkit",
        )
    if options.thin or options.plan.single_layer:
        thing = "--thin" if options.thin else "--single-layer"
        raise UsageError(f"{thing} is for the oci engine, {given} for the buildkit engine")
    if options.is_index:
        raise UsageError(f"{given}: the buildkit engine builds for one platform")


@contextlib.contextmanager
def of_registry(ref: Ref, builder: str) -> Iterator[None]:
    """Refuse a base on this machine for a remote builder, with a clear message."""
    try:
        yield
    except RemoteError as error:
        if not builder or not _is_here(ref):
            raise
        raise RemoteError(
            f"{ref} is in the Docker Engine here, but builder {builder} takes its base from a "
            f"registry: {error}",
            hint="push it to a registry that the builder can reach, then use "
            "--base docker://HOST/NAME:TAG",
        ) from None


def _is_here(ref: Ref) -> bool:
    from builder.images.engines import docker

    try:
        client = docker.connect()
    except EngineError:
        return False
    try:
        docker.find_image(client, ref.place, None, pull=False)
    except RemoteError:
        return False
    finally:
        client.close()
    return True


# --------------------------------------------------------------------------------------- one image


@dataclass(frozen=True, kw_only=True)
class PlannedBuild:
    """A planned build: an entry for each platform, with open bases."""

    entries: tuple[PlatformPlan, ...]
    inputs: Inputs
    #: seconds by step
    timings: Mapping[str, float]
    #: the base's reference as given
    ref: Ref
    #: whether a sandbox is being made for verification
    sandbox: bool


def check_options(options: ImageOptions) -> ImageOptions:
    """Check options and choose the engine; reads nothing.

    Raises:
        UsageError: two options contradict each other.
    """
    options = options.settled()
    names = (AUTO, *ENGINES)
    if options.engine not in names:
        guess = did_you_mean(options.engine, names)
        raise UsageError(f"unknown engine {options.engine!r}; engines: {', '.join(names)}{guess}")
    check_builder(options)
    check_destination(options, wanted_engine(options.engine, options.output))
    if options.plan.base_ref:
        check_base_options(options, options.plan.base_ref)
    return options


@contextmanager
def planned_image(options: ImageOptions) -> Iterator[PlannedBuild]:
    """Identify the base and plan for it; the base is open inside the block.

    Raises:
        NotServed: the profile does not support this base.
        SparkBuildError: there is nothing to do, or a layer cannot be applied.
    """
    inputs = inputs_of(options.plan)
    timings: dict[str, float] = {}
    with timed(timings, "plan"), console.step("base"):
        engine = wanted_engine(options.engine, options.output)
        check_docker_host(engine, options.plan.base_ref, options.builder)
        pull = not (options.dry_run or options.builder)
        ref = inputs.base_ref(reads_in_engine(engine), pull=pull)
        check_base_options(options, ref)
        with of_registry(ref, options.builder):
            planning = inputs.identify(
                ref, in_engine=False if options.builder else reads_in_engine(engine)
            )
    try:
        sandbox = _sandbox_for(planning.base, inputs, options)
        with in_background(sandbox):
            with timed(timings, "plan"), console.step("plan"):
                plan = planning.plan()
                if not options.json or not options.dry_run:
                    show_plan(plan, elsewhere=planning.elsewhere)
            refuse_nothing(plan, inputs.selection, building=True)
            refuse_plan(plan, planning.rebuild_command("image"))
            planning.refuse_stages(plan)
            entry = PlatformPlan(plan.base.platform.oci, planning, plan)
            yield PlannedBuild(
                entries=(entry,),
                inputs=inputs,
                timings=timings,
                ref=ref,
                sandbox=sandbox is not None,
            )
    finally:
        planning.close()


def dockerfile_of(options: ImageOptions, planned: PlannedBuild) -> str:
    """The Dockerfiles as text: compile stages first, then the image."""
    plan, base = planned.entries[0].plan, planned.entries[0].base
    engine, _ = engine_for(plan, base, options.engine, options.output, options.builder)
    return planned.entries[0].planning.stage_dockerfiles(plan) + engine.render(plan)


def build_image(options: ImageOptions, planned: PlannedBuild) -> BuildResult:
    """Compile pending units, build the image, and verify it.

    Raises:
        EngineError: no engine can build this plan.
        BuildFailed: the build, or a compiler, failed.
    """
    timings = dict(planned.timings)
    entry = planned.entries[0]
    base = entry.base
    engine, why = engine_for(entry.plan, base, options.engine, options.output, options.builder)
    if entry.plan.pending:  # what cannot be built is not compiled for
        with timed(timings, "compile"):
            entry = replace(entry, plan=entry.planning.compiled(entry.plan))
    plan = entry.plan
    if why:
        console.say(f"engine  {engine.name}, because {why}")
    request = _request(entry, options, engine)
    check_room([*engine.needs(request), *verification_needs(entry, options)])
    reports: tuple[Report, ...] = ()
    in_engine = request.output is None and not request.push  # the image itself is used
    with nullcontext() if in_engine else _dispatch_ahead(planned, entry, options):
        with timed(timings, "build"), console.step(f"build with {engine.name}"):
            built = engine.build(request)
        if options.verify:
            with timed(timings, "verify"), console.step("verify"):
                console.left = f"{built.subject} is complete, but not verified"
                reports = (_verified(built.subject, planned.inputs, plan, options),)
    started = run_commands(plan, built, write_dockerfile(plan, built), options.tag or "")
    return BuildResult(
        entries=(entry,), built=built, reports=reports, timings=timings, started=started
    )


def verification_needs(entry: PlatformPlan, options: ImageOptions) -> list[Need]:
    """The disk space needed to verify an image."""
    if not options.verify:
        return []
    from builder.proof.sandbox import sandbox_needs

    return sandbox_needs(entry.plan.base.packages, entry.base.tree)


def _request(entry: PlatformPlan, options: ImageOptions, engine: Engine) -> BuildRequest:
    place = destination_of(entry.plan, options, engine.name)
    return BuildRequest(
        plan=entry.plan,
        tag=place.tag,
        output=place.output,
        push=place.push,
        base=entry.base,
        thin=options.thin,
        cache_from=options.cache_from,
        cache_to=options.cache_to,
    )


# What verifies takes long to import, and a push without verification needs none of it.


def _sandbox_for(
    base: Subject, inputs: Inputs, options: ImageOptions
) -> Callable[[], object] | None:
    """What prepares the sandbox for verification, if an image is built that needs one."""
    if not options.verify or options.dry_run or options.print_dockerfile or base.in_engine:
        return None
    if not inputs.selection.expected(base.identity.packages):  # nothing is asked there
        return None
    from builder.proof.runners import InSandbox

    try:
        return InSandbox(base.tree, base.identity.packages).common_maker()
    except SparkBuildError:  # which verification will say
        return None


def _dispatch_ahead(
    planned: PlannedBuild, entry: PlatformPlan, options: ImageOptions
) -> AbstractContextManager[None]:
    """Ask for the kernels of an image while it is built, if a sandbox is made for it."""
    if not planned.sandbox:  # it exists, and may know the answer
        return nullcontext()
    from builder.pipeline.verify import trust_of
    from builder.proof.opening import dispatch_ahead

    return dispatch_ahead(entry.plan, entry.base, trust_of(entry.plan, planned.inputs, options))


def _verified(ref: Ref, inputs: Inputs, plan: BuildPlan, options: ImageOptions) -> Report:
    from builder.pipeline.verify import verify_built

    return verify_built(ref, inputs, plan, options)


# ------------------------------------------------------------------------------- several platforms

#: Platforms for which vLLM has wheels.
_PLATFORMS = ("linux/arm64", "linux/amd64")


@contextmanager
def planned_index(options: ImageOptions) -> Iterator[PlannedBuild]:
    """Plan for the entries that the profile supports; their bases are open inside the block.

    Raises:
        UsageError: the options do not apply to an index, or the base is not an index.
        SparkBuildError: no entry has anything to do.
    """
    ref = _check(options)
    inputs = inputs_of(options.plan)
    timings: dict[str, float] = {}
    with ExitStack() as opened:
        entries: list[PlatformPlan] = []
        with timed(timings, "plan"):
            for platform in _platforms(ref, options):
                planned = _plan(ref, platform, options, inputs)
                if planned is not None:
                    opened.callback(planned.planning.close)
                    entries.append(planned)
        if not entries:
            raise SparkBuildError(
                f"nothing to do: this profile supports no image of {ref}",
                Exit.NOTHING_TO_DO,
            )
        sandbox = _sandbox_for(entries[0].base, inputs, options)
        with in_background(sandbox):
            yield PlannedBuild(
                entries=tuple(entries),
                inputs=inputs,
                timings=timings,
                ref=ref,
                sandbox=sandbox is not None,
            )


def _check(options: ImageOptions) -> Ref:
    """Check that the options apply to an index, and return the base."""
    if options.others not in ("keep", "drop"):
        raise UsageError(f"--others {options.others!r} is neither keep nor drop")
    ref = options.plan.base_ref
    if ref is None or not ref.kind.is_image:
        raise UsageError("--all-platforms and --others need an image index: name it with --base")
    if options.plan.compile_here:
        raise UsageError(
            "--compile compiles only for this machine's architecture",
            hint="leave --all-platforms and --others out",
        )
    if options.print_dockerfile:
        raise UsageError(
            "--print-dockerfile works for one platform",
            hint="leave --all-platforms and --others out",
        )
    if (kind := named(options.engine)) is not None and not kind.writes_manifests:
        raise UsageError(f"the {kind.name} engine builds for one platform", hint="--engine oci")
    return ref


def _platforms(ref: Ref, options: ImageOptions) -> list[str]:
    """The platforms to patch."""
    with Locations() as locations:
        place = locations.open(ref)
        top = place.image.manifest(place.reference)
    if not is_index(top):
        raise UsageError(f"{ref} is a single image, not an index")
    has = [name for e in image_entries(top) if (name := platform_of(e)) in _PLATFORMS]
    rest = [name for e in subjects(top) if (name := platform_name(e.platform)) not in has]
    if rest:
        become = "kept as they are" if options.others == "keep" else "left out (see --others)"
        console.say(f"  {', '.join(rest)}: {become}")
    if options.all_platforms:
        if options.plan.platform is not None:
            raise UsageError("--platform and --all-platforms contradict each other")
        return list(dict.fromkeys(has))
    return [options.plan.platform or PREFERRED]


def _plan(ref: Ref, platform: str, options: ImageOptions, inputs: Inputs) -> PlatformPlan | None:
    """The plan for one entry, or None if the profile does not support it."""
    with console.step(f"base and plan for {platform}"):
        planning = inputs.identify(ref, platform=platform, in_engine=False)
        try:
            plan = planning.plan()
            if not options.json:
                show_plan(plan)
            refuse_nothing(plan, inputs.selection, building=True)
            refuse_plan(plan, planning.rebuild_command("image"))
        except SparkBuildError as error:
            planning.close()
            if error.code != Exit.NOTHING_TO_DO and not isinstance(error, NotServed):
                raise
            console.say(f"  {platform} is not patched: {error}")
            return None
        except BaseException:
            planning.close()
            raise
    return PlatformPlan(platform, planning, plan)


def build_images(options: ImageOptions, planned: PlannedBuild) -> BuildResult:
    """Build every entry and the index, and verify each entry.

    Raises:
        UsageError, BuildFailed, RemoteError: see ``engines.deliver``.
    """
    entries, first = planned.entries, planned.entries[0]
    request = _index_request(options, entries)
    needs = [need for single in request.requests for need in OciEngine().needs(single)]
    check_room([*needs, *verification_needs(first, options)])
    timings = dict(planned.timings)
    reports: list[Report] = []
    with _dispatch_ahead(planned, first, options):
        with timed(timings, "build"), console.step("build with oci"):
            built = build_index(request)
        for entry in entries if options.verify else ():
            with timed(timings, "verify"), console.step(f"verify {entry.platform}"):
                name = _name_of(entry, built)
                console.left = f"{built.image.ref} is complete, but not verified"
                reports.append(_verified(name, planned.inputs, entry.plan, options))
    return BuildResult(
        entries=entries,
        built=built.image,
        reports=tuple(reports),
        timings=timings,
        started=run_commands(first.plan, built.image),
        is_index=True,
    )


def _index_request(options: ImageOptions, entries: Sequence[PlatformPlan]) -> IndexRequest:
    place = _place(options, entries)
    return IndexRequest(
        requests=tuple(
            BuildRequest(
                plan=entry.plan,
                tag=place.tag,
                base=entry.base,
                output=place.output,
                push=place.push,
                thin=options.thin,
            )
            for entry in entries
        ),
        tag=place.tag,
        keep=options.others == "keep",
        output=place.output,
        push=place.push,
        thin=options.thin,
    )


def _place(options: ImageOptions, entries: Sequence[PlatformPlan]) -> Destination:
    """The destination of the index; without a tag, its name is derived from all plans."""
    place = destination_of(entries[0].plan, options, "oci")
    if options.tag is not None:
        return place
    name = place.tag.rpartition("-")[0]
    return replace(place, tag=f"{name}-{plans_digest(entries).removeprefix('sha256:')[:12]}")


def _name_of(entry: PlatformPlan, built: BuiltIndex) -> Ref:
    """An entry of the new index, as a target of verification."""
    assert entry.base.in_layers is not None
    digest = built.digests[entry.base.in_layers.image.manifest.digest]
    ref = built.image.ref
    return Ref(f"{ref}@{digest}" if ref.in_layout else f"docker://{ref}@{digest}")
