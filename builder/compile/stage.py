"""The compile stage of a plan: what it compiles, its pinned inputs, and its result.

Planning a stage compiles nothing: it pins the sources, the change, the compiler and the headers.
Running it makes an extension wheel (``extensionwheel.py``), which goes into an image like any other
wheel. It is cached under the digest of all its inputs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs
from msgspec.structs import replace
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from builder import __version__
from builder.applier.edits import judge_file
from builder.applier.layers import InputPin
from builder.applier.sources import Stage, Unstaged, wheel_members
from builder.applier.states import AMBIGUOUS, DRIFT, NEEDS_REBUILD, NOT_APPLICABLE, POST, UPSTREAM
from builder.applier.trees import DirTree
from builder.applier.values import ApplyError, canonical_json, normalize, read_value, sha256_hex
from builder.common.cache import locked
from builder.common.console import console, some_of
from builder.common.document import plain
from builder.common.files import write_atomically
from builder.common.paths import cache_dir, package_file
from builder.common.plan import (
    CompiledPull,
    FoundSources,
    Input,
    Platform,
    SourceFile,
    SourceUnit,
    StageRequest,
)
from builder.common.reference import Ref, image_of
from builder.common.wheels import RemoteWheel
from builder.compile.build import free_here, refuse_machine
from builder.compile.changes import (
    JudgedFile,
    PatchedSource,
    SourceBuild,
    SourceChange,
    affected_units,
    is_build_file,
    verdict,
)
from builder.compile.costs import cost_of_units
from builder.compile.extensionwheel import build_extension_wheel, request_for
from builder.compile.host import MEMBER
from builder.compile.known import stage_name
from builder.compile.link import DISTRIBUTIONS
from builder.compile.plans import gencode_of, plan_wheel
from builder.compile.sources import source_of
from builder.compile.toolchain import find_compiler, header_wheels, pinned_torch
from builder.errors import Exit, SparkBuildError, UsageError
from builder.images.bases.identify import identify
from builder.images.subject import BaseRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.layers import Compile
    from builder.applier.sources import Member
    from builder.applier.states import Target
    from builder.applier.trees import Tree
    from builder.common.forge import Forges
    from builder.common.pypi import PackageIndex
    from builder.compile.costs import Cost
    from builder.compile.executor import ToolkitChoice
    from builder.compile.plans import WheelPlan
    from builder.compile.sources import SourceTree
    from builder.compile.toolchain import Compiler
    from builder.images.subject import Subject


def with_libraries(
    ref: Ref, platform: str, index: PackageIndex, *, python: str | None = None
) -> Subject:
    """A base with the libraries of its extensions."""
    tracked = DISTRIBUTIONS
    return identify(
        BaseRequest(
            ref=ref, platform=platform, python=python, pins={}, tracked=tracked, index=index
        )
    )


def refuse_cpu_torch(index: PackageIndex, torch: str, target: Target, release: str) -> None:
    """Refuse a torch without CUDA, against which an extension wheel cannot be checked.

    Raises:
        SparkBuildError: it is a CPU build (exit 10).
    """
    platform = Platform.parse(target.platform, target.python)
    wheel = RemoteWheel(index.choose("torch", torch, platform), index)
    if "torch/lib/libtorch_cuda.so" not in wheel.members:
        raise SparkBuildError(
            f"torch {torch} for {target.platform} on the package index is a CPU build, but "
            f"compiled code must be checked against the libraries of a CUDA build",
            Exit.NEEDS_REBUILD,
            hint=f"name the target image or environment: --base {image_of(release)}",
        )


# ----------------------------------------------------------------- what it compiles, or why nothing


#: Folders that the build of extensions reads.
_READ = ("csrc/", "cmake/", "CMakeLists.txt")
#: Names that a reason lists at most.
_LISTED = 4


@dataclass(frozen=True)
class CompileWork:
    """A stage's work: sources, changes, and affected units."""

    source: SourceTree
    change: SourceChange
    plan: WheelPlan
    #: changed files, with the sha256 before and after; None for a missing file
    files: tuple[SourceFile, ...]
    #: the state of the last change in the sources
    sources: FoundSources
    #: why it has no effect, if no later change fixes it
    refusal: Unstaged | None


@dataclass(frozen=True)
class AlreadyPresent:
    """The sources already have the last change; the base's binary shows whether the base has it."""

    extensions: tuple[str, ...]
    sources: FoundSources


def plan_changes(
    before: SourceBuild, ops: Sequence[Compile], folder: Path
) -> CompileWork | AlreadyPresent | Unstaged:
    """Apply the changes of ``compile`` ops to a release's sources, and find affected units.

    Args:
        before: the sources as released.
        ops: for the same architectures; reasons are about the last one.
        folder: a new path for the changed sources.

    Raises:
        SparkBuildError: a built-in change does not match (exit 4), is already in the
            sources, or is not possible with an extension wheel (exit 10).
        UsageError: the changed build files cannot be evaluated.
        EngineError: cmake is missing.
    """
    patched = PatchedSource(before.source, folder)
    for op in ops[:-1]:
        _lay(patched, op)
    judged = _lay(patched, ops[-1])
    after = patched.built(before)
    if ops[-1].change:
        if not patched.texts:
            raise _has_it(ops[-1], before)
        work = _work(before, after, patched, ops, _facts(ops[-1], before))
        if isinstance(work, Unstaged):
            raise SparkBuildError(work.reason, Exit.NEEDS_REBUILD, "; ".join(work.notes))
        return work
    return _PullStage(before, after, patched, ops).planned(judged)


def _lay(patched: PatchedSource, op: Compile) -> list[JudgedFile]:
    if not op.change:
        return patched.diff(op.diff)
    patched.known(op.change)
    return []


def _has_it(op: Compile, before: SourceBuild) -> SparkBuildError:
    release = before.source.version
    return SparkBuildError(
        f"the sources of vllm {release} have {op.change_name} already, but this base was not "
        "built for SM121 from them",
        Exit.NEEDS_REBUILD,
        hint=f"build yours with TORCH_CUDA_ARCH_LIST={before.arch_list}"
        + ("" if Version(release).is_devrelease else f", or --base pypi:vllm=={release}"),
    )


def _work(
    before: SourceBuild,
    after: SourceBuild,
    patched: PatchedSource,
    ops: Sequence[Compile],
    sources: FoundSources,
) -> CompileWork | Unstaged:
    """The work for all changes together."""
    texts = patched.texts
    affected = affected_units(before, after, texts)
    # only for the last op: earlier ones have reported already
    mine = {path for path in ops[-1].files if path in affected.unreached}
    facts = replace(sources, unreached=tuple(sorted(mine)) or None)
    if affected.refusal:
        return _refused(affected.refusal, facts)
    if not affected.rebuilt:
        return _nothing(before, sorted(texts), facts)
    counted = {path: text for path, text in texts.items() if path not in affected.unreached}
    change = SourceChange(
        name=stage_name(ops),
        texts={p: t for p, t in counted.items() if t is not None and p in after.sources.texts},
    )
    plan = plan_wheel(
        after.source,
        change,
        before.arch_list,
        before.cuda,
        rebuilt=affected.rebuilt,
        recipe=after.recipe,
    )
    pristine = DirTree(before.source.root)
    files = tuple(
        SourceFile(
            path=path,
            before=pristine.digest(path),
            after=None if text is None else sha256_hex(text),
        )
        for path, text in counted.items()
    )
    traps = _refused(affected.traps[0], facts, affected.traps[1]) if affected.traps[0] else None
    return CompileWork(after.source, change, plan, files, facts, traps)


def _facts(op: Compile, before: SourceBuild) -> FoundSources:
    return FoundSources(
        change=op.change_name,
        filename=before.source.origin,
        sha256=before.source.sha256,
        found="to-compile",
    )


def _refused(reason: str, facts: FoundSources, hint: str = "") -> Unstaged:
    updated = replace(facts, found="not-compiled")
    return Unstaged(NEEDS_REBUILD, reason, updated, notes=(hint,) if hint else ())


def _nothing(before: SourceBuild, paths: Sequence[str], facts: FoundSources) -> Unstaged:
    release, arch = before.source.version, before.arch_list
    reason = (
        f"no unit that vllm {release} builds for {arch} comes from {some_of(paths, _LISTED)}: "
        "no effect on SM121"
    )
    updated = replace(facts, found="nothing", unreached=tuple(paths))
    return Unstaged(NOT_APPLICABLE, reason, updated)


@dataclass(frozen=True)
class _PullStage:
    """The decision for a pull request's op, the last of some ops."""

    before: SourceBuild
    after: SourceBuild
    patched: PatchedSource
    ops: Sequence[Compile]

    def planned(self, judged: Sequence[JudgedFile]) -> CompileWork | AlreadyPresent | Unstaged:
        """The decision."""
        facts = _facts(self.ops[-1], self.before)
        other = [path for path in self.ops[-1].files if not path.startswith(_READ)]
        if other:
            return _refused(f"{some_of(other, _LISTED)} are not compiled by nvcc", facts)
        counting = [one for one in judged if self._counts(one)]
        if not counting:
            return _nothing(self.before, list(self.ops[-1].files), facts)
        finding, reason = verdict(counting)
        if finding in (DRIFT, AMBIGUOUS):
            detail = f"{reason} (in {facts.filename})"
            return Unstaged(finding, detail, replace(facts, found="conflict"))
        if finding == POST and self._released(counting):
            return AlreadyPresent(self._extensions(counting), replace(facts, found="there"))
        try:
            return _work(self.before, self.after, self.patched, self.ops, facts)
        except SparkBuildError as error:
            if error.code not in (Exit.NEEDS_REBUILD, Exit.USAGE):
                raise
            return _refused(str(error), facts, error.hint)

    def _counts(self, one: JudgedFile) -> bool:
        """Whether a file is compiled, before or after the change."""
        paths = {path for path in (one.change.old, one.change.new) if path}
        reached = self.before.reached | self.after.reached
        return bool(paths & reached) or any(map(is_build_file, paths))

    def _released(self, counting: Sequence[JudgedFile]) -> bool:
        """Whether the release has it, without earlier changes."""
        tree = DirTree(self.before.source.root)
        again = [JudgedFile(one.change, judge_file(one.change, tree)) for one in counting]
        return verdict(again)[0] == POST

    def _extensions(self, counting: Sequence[JudgedFile]) -> tuple[str, ...]:
        """The extensions that use its files; all for build files."""
        paths = {one.change.path for one in counting}
        units = self.before.recipe.units
        hit = {units[unit].extension for unit, all_ in self.before.closures.items() if all_ & paths}
        return tuple(sorted(hit or {unit.extension for unit in units.values()}))


# ---------------------------------------------------------------------------------------- the stage


@dataclass(frozen=True)
class RejectedDiff:
    """Sources that a diff does not match, at the time of judging."""

    tree: Tree
    diff: str
    archive: str


class Stages:
    """Compile stages for the layers of a plan (``--compile``): planning and running them."""

    def __init__(
        self,
        index: PackageIndex,
        forges: Forges | None = None,
        nvcc: str | None = None,
        toolkit: ToolkitChoice | None = None,
    ) -> None:
        """Use the compiler from ``find_compiler``, or the given ``nvcc`` or ``toolkit``."""
        self._index = index
        self._toolkit = toolkit
        self._forges = forges
        self._nvcc = nvcc
        self._compilers: dict[str, Compiler] = {}
        #: decisions, by the digest of the question
        self._decided: dict[str, CompileWork | AlreadyPresent | Unstaged] = {}
        #: compile work, by the digest of the request
        self._work: dict[str, tuple[CompileWork, Compiler]] = {}
        self._built: dict[tuple[str, str, str], SourceBuild] = {}
        self._folder: Path | None = None
        #: file name of a stage's wheel -> its path
        self.wheels: dict[str, Path] = {}
        #: request of a pull request -> the sources that its hunks do not match
        self.rejected_diffs: dict[str, RejectedDiff] = {}

    # -- planning

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged:
        """The stage for some ``compile`` ops, with its wheel if it is cached.

        ``module`` returns the sha256 of the base's extension, such as ``vllm/_C``; the wheel
        extends it, and is checked against it.

        Raises:
            EngineError: there is no compiler for the base's architecture.
            UsageError: the release's sources are not on the index, or cannot be read.
            RemoteError: the sources cannot be fetched.
            SparkBuildError: the sources have neither text of a built-in change
                (drift, exit 4), or already have it (exit 10).
        """
        vllm = packages["vllm"]
        release = Version(vllm).public
        compiler = self._compiler(target.platform)
        key = _digest([[asdict(op) for op in ops], vllm, compiler.cuda])
        if key not in self._decided:
            with console.step(f"sources of vllm {release}"):
                self._decided[key] = self._decide(ops, vllm, compiler.cuda)
        decided = self._decided[key]
        if isinstance(decided, Unstaged):
            return decided
        if isinstance(decided, AlreadyPresent):
            return self._present(decided, release, target, module)
        beside = module(decided.plan.module)
        if not beside:
            reason = f"the base has no {decided.plan.module} for it to extend"
            return Unstaged(
                NEEDS_REBUILD, reason, structs.replace(decided.sources, found="not-compiled")
            )
        request = self._request(ops, decided, compiler, packages.get("torch", ""), target, beside)
        self._work[_folder(request).name] = decided, compiler
        sources = None if ops[-1].change else decided.sources  # what it is, the layer says
        return Stage(request, self._cached(request), sources, decided.refusal)

    def _compiler(self, platform: str) -> Compiler:
        """The compiler, found once: this queries versions, or resolves an image's tag."""
        if platform not in self._compilers:
            compiler = find_compiler(self._index, platform, self._nvcc, self._toolkit)
            self._compilers[platform] = compiler
        return self._compilers[platform]

    def _decide(
        self, ops: Sequence[Compile], vllm: str, cuda: str
    ) -> CompileWork | AlreadyPresent | Unstaged:
        archs = sorted({op.arch for op in ops})
        if len(archs) != 1:
            raise UsageError(
                f"{stage_name(ops)} are compiled together, but name {' and '.join(archs)}",
                hint="give the ops of your layers the same 'arch'",
            )
        if (vllm, archs[0], cuda) not in self._built:
            source = source_of(self._index, vllm, self._forges)
            self._built[vllm, archs[0], cuda] = SourceBuild(source, archs[0], cuda)
        before = self._built[vllm, archs[0], cuda]
        folder = self._new_folder()
        decided = plan_changes(before, ops, folder)
        if isinstance(decided, Unstaged) and decided.state in (DRIFT, AMBIGUOUS):
            last = ops[-1]
            self.rejected_diffs[last.file] = RejectedDiff(
                DirTree(folder), last.diff, before.source.origin
            )
        return decided

    def _new_folder(self) -> Path:
        """A temporary path for changed sources."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="spark-build-sources-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / str(len(self._decided))

    def _present(
        self, present: AlreadyPresent, release: str, target: Target, module: Callable[[str], str]
    ) -> Unstaged:
        """The result if the sources already have the change: the release's binary has it too."""
        name = present.sources.filename
        for extension in present.extensions:
            path = f"vllm/{extension}"
            ours = module(path)
            if ours not in self._released(path, release, target):
                reason = (
                    f"{name} has it already, but {path} of this base is not from a released "
                    f"wheel ({ours[:12] or 'there is none'}), so its sources are unknown"
                )
                return Unstaged(NEEDS_REBUILD, reason, present.sources)
        built = ", ".join(f"vllm/{extension}" for extension in present.extensions)
        reason = f"{name} has it, and {built} of this base is as released, built from it"
        return Unstaged(UPSTREAM, reason, present.sources, since=f"vLLM {release}")

    def _released(self, path: str, release: str, target: Target) -> set[str | None]:
        """The sha256 of an extension in the released wheel; None if it is not a release."""
        if Version(release).is_devrelease:
            return set()
        platform = Platform.parse(target.platform, target.python)
        wheel = RemoteWheel(self._index.choose("vllm", release, platform), self._index)
        return {m.sha256 for name, m in wheel.members.items() if name.startswith(f"{path}.")}

    def _request(
        self,
        ops: Sequence[Compile],
        work: CompileWork,
        compiler: Compiler,
        torch: str,
        target: Target,
        module: str,
    ) -> StageRequest:
        release, plan = work.source.version, work.plan
        if not torch:  # a base of released wheels has the torch that it would be installed with
            torch = pinned_torch(work.source.root)
            refuse_cpu_torch(self._index, torch, target, release)
        sources = Input(
            distribution="vllm",
            version=release,
            filename=work.source.origin,
            sha256=work.source.sha256,
            member="sources to compile",
        )
        headers = header_wheels(self._index, compiler, Version(torch).public)
        pulls = [CompiledPull(request=op.file, **asdict(op.pull)) for op in ops if op.pull]
        return StageRequest(
            change=work.change.name,
            arch=ops[-1].arch,
            platform=target.platform,
            vllm=release,
            torch=torch,
            module=module,
            compilers=compiler.versions,
            operators=tuple(operator.name for operator in plan.operators),
            files=work.files,
            units=tuple(
                SourceUnit(path=unit.path, extension=unit.extension, gencode=gencode_of(unit))
                for unit in (*plan.rebuilt, *plan.siblings)
            ),
            inputs=(
                sources,
                *(structs.replace(pin, member="headers") for pin in headers),
                *(structs.replace(pin, member=MEMBER) for pin in compiler.pins),
            ),
            toolkit=compiler.container.planned if compiler.container else None,
            pulls=tuple(pulls) or None,
        )

    @property
    def elsewhere(self) -> bool:
        """Whether units are compiled on another machine, whose memory and disk are unknown."""
        return self._toolkit is not None and self._toolkit.containers.elsewhere

    def refuse_small(self, request: StageRequest) -> Cost:
        """The cost of a stage; refused if this machine compiles and is clearly too small.

        Raises:
            EngineError: memory or disk space is too small.
        """
        paths = [unit.path for unit in request.units]
        if self.elsewhere:
            return cost_of_units(paths, jobs=1)
        cost = cost_of_units(paths)
        refuse_machine(cost, *free_here())
        return cost

    def _cached(self, request: StageRequest) -> InputPin | None:
        """The pin of a stage's wheel, if it is cached and intact."""
        folder = _folder(request)
        try:
            raw = json.loads((folder / "wheel.json").read_bytes())
            pin: InputPin = read_value(InputPin, raw, "wheel.json")
            data = (folder / pin.filename).read_bytes()
        except (OSError, ValueError, ApplyError):
            return None
        if sha256_hex(data) != pin.sha256:
            return None
        self.wheels[pin.filename] = folder / pin.filename
        return pin

    def dockerfile(self, request: StageRequest) -> str:
        """The Dockerfile of a stage with a toolkit image, for display; else ``""``."""
        container = self._work[_folder(request).name][1].container
        if container is None:
            return ""
        units = [unit.path for unit in request.units]
        header = f"# {request.change}: {', '.join(units)}; folders of headers are mounted too"
        return f"{header}\n{container.render(units)}\n"

    # -- running

    def run(self, request: StageRequest, base: Subject) -> None:
        """Compile a stage and cache its wheel.

        Raises:
            EngineError: this machine is too small, or a tool is missing.
            BuildFailed: compiling or linking fails.
            SparkBuildError: the result would not load, or its kernels are not real (exit 5).
        """
        cost = self.refuse_small(request)
        folder = _folder(request)
        with locked(f"extension wheel {folder.name}"):
            if self._cached(request) is not None:
                return
            console.say(f"  {request.change} for {request.arch}: {cost}")
            wheel = build(request, *self._work[folder.name], base, self._index)
            name, version, _, _ = parse_wheel_filename(wheel.name)
            pin = InputPin(
                distribution=normalize(name),
                version=str(version),
                filename=wheel.name,
                sha256=sha256_hex(wheel.read_bytes()),
            )
            write_atomically(folder / "wheel.json", json.dumps(asdict(pin)).encode())
        self.wheels[wheel.name] = wheel

    # -- the resulting wheels, with the interface of a wheel on an index

    def members(self, filename: str) -> list[Member]:
        """The files of a stage's wheel."""
        with zipfile.ZipFile(self.wheels[filename]) as archive:
            return wheel_members(archive)

    def member(self, filename: str, path: str) -> bytes:
        """One file of it."""
        with zipfile.ZipFile(self.wheels[filename]) as archive:
            return archive.read(path)


def _digest(value: object) -> str:
    return sha256_hex(canonical_json(value))


def _folder(request: StageRequest) -> Path:
    """The cache folder of its wheel, keyed by the request, our version and our loader."""
    loader = package_file("probes", "wheel_loader.py").read_bytes()
    key = [plain(request), __version__, sha256_hex(loader)]
    return cache_dir() / "companions" / sha256_hex(canonical_json(key))[:32]


def build(
    request: StageRequest,
    work: CompileWork,
    compiler: Compiler,
    base: Subject,
    index: PackageIndex,
) -> Path:
    """Build the extension wheel of a stage in the stage's cache folder."""
    with _with_torch(base, index) as tree:
        wanted = request_for(
            index,
            tree,
            work.source,
            work.change,
            compiler,
            arch_list=request.arch,
            plan=work.plan,
        )
        return build_extension_wheel(wanted, _folder(request)).path


@contextmanager
def _with_torch(base: Subject, index: PackageIndex) -> Iterator[Tree]:
    """A base's files with the libraries of its extensions, which a plan for wheels lacks."""
    if not base.identity.is_wheels:
        yield base.tree
        return
    identity = base.identity
    python = ".".join(map(str, identity.platform.python_version))
    ref = Ref(f"pypi:vllm=={identity.packages['vllm']}")
    torch = with_libraries(ref, identity.platform.oci, index, python=python)
    try:
        yield torch.tree
    finally:
        torch.close()
