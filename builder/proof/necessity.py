"""Whether each layer is necessary: removes it, and finds the check that then fails.

The remaining layers are judged and applied again on the base, and the result is compared with what
the profile expects.  A missing layer, or an unset variable of it, is not a proof: only results of
vLLM, a compiler or another layer count.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import structs

from builder.applier.layers import InputPin
from builder.applier.machinecode import EXTENSION_WHEELS
from builder.applier.receipts import RECEIPTS, kept_true, parse_record, receipts_of
from builder.applier.sources import Member, Stage, Unstaged
from builder.applier.states import APPLIED, NEEDED, NOT_APPLICABLE, UPSTREAM
from builder.applier.trees import OverlayTree, distribution_of
from builder.applier.values import ApplyError, normalize, sha256_hex
from builder.common.console import console
from builder.common.plan import StageRequest
from builder.compile.known import stage_name
from builder.errors import SparkBuildError, UsageError
from builder.layers.catalog import Selection
from builder.layers.planner import make_plan
from builder.proof.checks import PROOF_LEVELS, Check, Necessity
from builder.proof.kernels import wanted_kernels, wanted_launches
from builder.proof.run import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.layers import Compile, DonorPin, Kernels, Layer
    from builder.applier.machinecode import KernelCode
    from builder.applier.sources import Sources
    from builder.applier.states import Target
    from builder.applier.trees import Tree
    from builder.common.plan import PlannedLayer
    from builder.images.subject import Subject
    from builder.proof.report import Report
    from builder.proof.target import VerifyTarget


_IN_FORCE = (NEEDED, APPLIED)
#: Decorator of a CuTe DSL kernel.
_KERNEL = b"@cute.kernel"


# -------------------------------------------------------------------- the target with some layers


def put_together(
    before: Subject, target: VerifyTarget, layers: Sequence[Layer], name: str
) -> VerifyTarget:
    """The target with only these layers, and the original target's expectations.

    ``before`` is its subject without layers.

    Raises:
        ApplyError: an input of a layer is not pinned, or has another digest.
        UsageError: a layer shares its extension wheel with another.
        RemoteError: an input cannot be downloaded.
    """
    assert target.origin is not None
    sources = InstalledWheelSources(target.origin.sources, target.tree, target.plan.layers)
    plan = make_plan(before, Selection(tuple(layers), ()), sources)
    if plan.pending:
        together = plan.stages[0].change
        raise UsageError(f"{together} is compiled into the same extension wheel as another change")
    tree = OverlayTree(before.tree)
    tree.update(plan.changes)
    return replace(
        target.planned(tree, {**before.identity.env, **plan.env}),
        name=name,
        plan=structs.replace(plan.document, expect=target.plan.expect),
        layers=layers,
        label=None,
    )


def difference(target: VerifyTarget, again: VerifyTarget) -> str | None:
    """A file that differs between a target and a new one with the same layers, or None.

    Receipts of an installed environment have more fields than those of a plan, and compiled files
    are created whenever Python runs.  Level ``static`` checks the rows of RECORD.
    """
    overlay = again.tree
    assert isinstance(overlay, OverlayTree)
    paths = {*overlay.changes, *(p for r in receipts_of(target.tree) for p in r.files)}
    paths -= kept_true(receipts_of(target.tree)) | kept_true(receipts_of(overlay))
    compared = (p for p in paths if not p.startswith(f"{RECEIPTS}/") and not p.endswith(".pyc"))
    return min((p for p in compared if target.tree.digest(p) != overlay.digest(p)), default=None)


# ------------------------------------------------------------------------------- one layer removed


@contextmanager
def whole(target: VerifyTarget) -> Iterator[tuple[VerifyTarget, Subject | str]]:
    """The target with all its layers, and its subject without, or why that is unknown.

    Released wheels, and bases without applied layers, are proven as planned.
    """
    apart = _take_apart(target)
    if isinstance(apart, str):
        yield target, apart
        return
    try:
        full = target
        if not receipts_of(target.tree):
            full = put_together(apart, target, target.layers, f"{target.name} as planned")
            full = replace(full, plan=target.plan)
        yield full, apart
    finally:
        apart.close()


def _take_apart(target: VerifyTarget) -> Subject | str:
    if target.origin is None:
        return "the contents of this target are unknown"
    try:
        return target.origin.before()
    except (SparkBuildError, ApplyError) as error:
        return f"{error}; try: {error.hint}" if error.hint else str(error)


def prove(full: VerifyTarget, apart: Subject | str, report: Report) -> list[Necessity]:
    """The necessity of each layer of the plan, in order of application.

    Args:
        full: the target with all its layers.
        apart: its subject without layers, or why that is unknown.
        report: the report on it.
    """
    problem = apart if isinstance(apart, str) else _no_control(full, apart, report)
    verdicts: dict[str, Necessity] = {}
    for layer in reversed(full.plan.layers):  # one that builds on another comes after it
        if layer.state not in _IN_FORCE:
            verdict = _idle(layer)
        elif isinstance(apart, str) or problem:
            verdict = _unknown(layer, problem)
        else:
            verdict = _Removal(full, apart, report, verdicts).judge(layer)
        verdicts[layer.name] = verdict
    return [verdicts[layer.name] for layer in full.plan.layers]


def _no_control(full: VerifyTarget, apart: Subject, report: Report) -> str:
    """Why a failure without a layer would prove nothing, or ``""``."""
    failed = report.of("fail")
    if failed:
        return f"verification of the full set already fails: {failed[0].level} {failed[0].name}"
    try:
        again = put_together(apart, full, full.layers, full.name)
    except (SparkBuildError, ApplyError) as error:
        return f"the layers cannot be applied again: {error}"
    other = difference(full, again)
    if other is None:
        return ""
    return f"{other} does not match the output of these layers, so more than one would be removed"


def _idle(layer: PlannedLayer) -> Necessity:
    why = f"it changes nothing here ({layer.state}): {layer.reason}"
    return Necessity(layer=layer.name, state=layer.state, necessary=False, reason=why)


def _unknown(layer: PlannedLayer, reason: str) -> Necessity:
    return Necessity(layer=layer.name, state=layer.state, necessary="unknown", reason=reason)


@dataclass(frozen=True)
class _Removal:
    """The full set, and the results for the layers after the current one."""

    full: VerifyTarget
    apart: Subject
    report: Report
    later: Mapping[str, Necessity]

    def judge(self, layer: PlannedLayer) -> Necessity:
        """Test the target without one layer."""
        name, state = layer.name, layer.state
        rest = [other for other in self.full.layers if other.name != name]
        title = f"{self.full.name} without {name}"
        in_force = [x.name for x in self.full.plan.layers if x.state in _IN_FORCE]
        number = len(in_force) - in_force.index(name)
        with console.step(f"without {name} ({number} of {len(in_force)})"):
            try:
                without = put_together(self.apart, self.full, rest, title)
                if _same(self.full, without):
                    why = "nothing changes without it: the base has the change itself"
                    return Necessity(layer=name, state=state, necessary=False, reason=why)
                return self._compared_with_the_rest(layer, without)
            except (SparkBuildError, ApplyError) as error:
                return _unknown(layer, f"it cannot be removed: {error}")

    def _compared_with_the_rest(self, layer: PlannedLayer, without: VerifyTarget) -> Necessity:
        left_out: list[str] = []
        ran: list[str] = []
        levels = dict.fromkeys(check.level for check in self.report.checks)
        proof = (*PROOF_LEVELS, "numbers", *_of_code(layer))
        for level in (name for name in levels if name in proof):
            of_level = (
                self._others(without) if level == "static" else verify(without, [level]).checks
            )
            failed = [check for check in of_level if self._counts(check)]
            if failed:
                first, *more = failed
                return Necessity.by(layer.name, layer.state, first, more)
            ran.append(level)
            left_out += [
                _why_not_run(c) for c in of_level if c.status == "not-run" and self._ran(c)
            ]
        left_out += self._never_asked(layer)
        words = f"no check fails without it ({', '.join(ran)})"
        if left_out:
            return _unknown(layer, f"{words}, but {left_out[0]}")
        return Necessity(layer=layer.name, state=layer.state, necessary=False, reason=words)

    def _others(self, without: VerifyTarget) -> list[Check]:
        """Layers in effect in the full set that no longer apply."""
        now = {layer.name: layer for layer in without.plan.layers}
        checks = []
        for layer in self.full.plan.layers:
            other = now.get(layer.name)
            if layer.state not in _IN_FORCE or other is None:
                continue
            stands = other.state in (*_IN_FORCE, UPSTREAM)
            check = Check(
                level="static",
                name=f"layer {layer.name}",
                status="pass" if stands else "fail",
                expected="it can be applied",
                seen=f"{other.state}: {other.reason}",
                where=f"plan of {without.name}",
                reason="" if stands else f"layer {layer.name} builds on it",
            )
            checks.append(check)
        return checks

    def _counts(self, check: Check) -> bool:
        """Whether a failed check is proof: the full set passes it, and it is relevant."""
        if check.status != "fail":
            return False
        other = self.later.get(check.name.removeprefix("layer "))
        if check.level == "static":  # a layer that is not necessary itself makes no other so
            return other is not None and other.necessary is True
        before = self._before(check)
        return before is None or before.status == "pass"

    def _before(self, check: Check) -> Check | None:
        same = (c for c in self.report.checks if (c.level, c.name) == (check.level, check.name))
        return next(same, None)

    def _ran(self, check: Check) -> bool:
        before = self._before(check)
        return before is not None and before.status != "not-run"

    def _never_asked(self, layer: PlannedLayer) -> list[str]:
        """Levels that could still show it: those that query vLLM, the compiler, or machine code.

        For a change to a kernel's source, also its numbers.
        """
        expect = self.full.plan.expect
        deciding = ["dispatch"] if expect else []
        deciding += ["numbers"] if wanted_launches(expect) and self._of_kernels(layer) else []
        deciding += _of_code(layer)
        deciding += ["codegen"] if wanted_kernels(expect) else []
        missing = []
        for level in deciding:
            of_level = [check for check in self.report.checks if check.level == level]
            skipped = [c for c in of_level if c.status == "not-run" and not c.moot]
            if not of_level:
                missing.append(f"{level} was not requested (--level {level})")
            elif skipped:
                missing.append(_why_not_run(skipped[0]))
        return missing

    def _of_kernels(self, layer: PlannedLayer) -> bool:
        """Whether the layer changes a source file of a kernel."""
        texts = (self.full.tree.read(file.path) for file in layer.files)
        return any(_KERNEL in text for text in texts if text)


def _of_code(layer: PlannedLayer) -> list[str]:
    """The level that reads machine code, for a layer that compiles code: no other can show it."""
    stage = layer.compile
    return ["binaries"] if stage and (stage.stage or stage.carrier) else []


def _same(full: VerifyTarget, without: VerifyTarget) -> bool:
    settings = attrgetter("env", "serve_flags", "moe_serve_flags")
    return difference(full, without) is None and settings(full.plan) == settings(without.plan)


def _why_not_run(check: Check) -> str:
    return f"{check.level} {check.name} did not run: {check.reason}"


# -------------------------------------------------------------- compiled files of the target itself


#: State of the sources in a plan -> the layer's state.
_UNSTAGED = {"nothing": NOT_APPLICABLE, "there": UPSTREAM}


@dataclass(frozen=True)
class InstalledWheelSources:
    """Sources that take compiled files from the tree itself."""

    sources: Sources
    tree: Tree
    #: layers of the target's plan, with and without compile stages
    planned: Sequence[PlannedLayer] = ()

    def donor(self, pin: DonorPin) -> bytes:
        return self.sources.donor(pin)

    def members(self, pin: InputPin) -> list[Member]:
        if not distribution_of(pin.filename):
            return self.sources.members(pin)
        return list(self._members(pin.filename))

    def member(self, pin: InputPin, path: str) -> bytes:
        if not distribution_of(pin.filename):
            return self.sources.member(pin, path)
        return self.tree.read(path) or b""

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        return self.sources.code(tree, path, wanted, digest)

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        for layer in self.planned:
            sources = layer.compile.sources if layer.compile else None
            state = _UNSTAGED.get(sources.found) if sources else None
            if sources and state and sources.change == ops[-1].change_name:
                return Unstaged(state, "as planned", sources, since=layer.since)
        change = stage_name(ops)
        wanted = normalize(f"{EXTENSION_WHEELS}{change}")
        request = _stand_in(change, ops[-1].arch)
        for receipt in receipts_of(self.tree):
            for path, entry in receipt.files.items():
                folder, _, name = path.partition("/")
                dist = distribution_of(folder)
                if name != "RECORD" or "compile" not in entry.ops or dist is None:
                    continue
                if f"-{normalize(change)}-" in f"-{dist.name}-" and dist.name != wanted:
                    return Stage(request)  # part of it, which does not exist alone
                if dist.name == wanted:
                    digest = entry.after or ""
                    return Stage(request, InputPin(dist.name, dist.version, folder, digest))
        return self.sources.stage(ops, packages, target, module)

    def _members(self, info_dir: str) -> Iterator[Member]:
        """The files in its RECORD, without those that the installation added."""
        record = self.tree.read(f"{info_dir}/RECORD") or b""
        for row in parse_record(record):
            if row.sha256 and row.path != f"{info_dir}/INSTALLER":
                mode = self.tree.mode(row.path)
                yield Member(row.path, row.sha256, row.size or 0, mode)
        yield Member(f"{info_dir}/RECORD", sha256_hex(record), len(record), 0o644)


def _stand_in(change: str, arch: str) -> StageRequest:
    """A stage of which only the result is known."""
    return StageRequest(
        change=change,
        arch=arch,
        platform="",
        vllm="",
        torch="",
        module="",
        compilers={},
        operators=(),
        files=(),
        units=(),
        inputs=(),
    )
