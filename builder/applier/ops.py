"""Judges each op of a layer on a tree: its finding and its changes."""

from __future__ import annotations

import base64
import difflib
import fnmatch
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from builder.applier.diff import NOT_PYTHON, parse_diff
from builder.applier.edits import (
    create_file,
    edit_file,
    graft_text,
    judge_diff,
    read_envs,
    replace_text,
    run_hook,
    undone,
)
from builder.applier.machinecode import (
    ABSENT,
    EXTENSION_WHEELS,
    NO_CODE,
    RUNS,
    Compiled,
    ModuleCode,
    describe_code,
)
from builder.applier.receipts import (
    INSTALLER,
    OWN_RECORD,
    explained,
    parse_record,
    receipts_of,
    record_of,
    record_row,
    recorded_paths,
)
from builder.applier.sources import Unstaged
from builder.applier.states import (
    AMBIGUOUS,
    DRIFT,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
    POST,
    PRE,
    SKIP,
    UPSTREAM,
    OpResult,
    Target,
)
from builder.applier.trees import (
    Changes,
    Content,
    DirTree,
    Distribution,
    OverlayTree,
    Tree,
    collision,
    stale_pyc,
    versions,
)
from builder.applier.values import (
    EXIT_USAGE,
    ApplyError,
    checked_path,
    normalize,
    sha256_hex,
    version_matches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.applier.layers import (
        Compile,
        Copy,
        Diff,
        DonorPin,
        Env,
        Graft,
        Hook,
        InputPin,
        Kernels,
        Layer,
        Op,
        Pull,
        Remove,
        Replace,
        Wheel,
        WheelPin,
    )
    from builder.applier.sources import Member, Sources


@dataclass
class SharedStage:
    """The ``compile`` ops of a plan.  They share one stage: if two extension wheels registered the
    same operator, one would silently override the other.

    ``last`` is the number of ops, and ``carrier`` the layer that installs the result; they
    are unknown while the ops are counted.
    """

    last: int | None = None
    carrier: str = ""
    #: layer and op of changes to compile
    ops: list[tuple[str, Compile]] = field(default_factory=list)
    #: the same for applied layers, whose compiled changes are installed
    standing: list[tuple[str, Compile]] = field(default_factory=list)
    #: folders of this plan's compiled results, which do not show the base's state
    compiled_folders: set[str] = field(default_factory=set)

    def with_op(self, op: Compile) -> list[Compile]:
        """The inputs of a stage up to an op."""
        return [*(known for _, known in (*self.standing, *self.ops)), op]

    def layers(self) -> set[str]:
        """The layers whose extension wheels a new one replaces."""
        return {name for name, _ in (*self.standing, *self.ops)}

    def add(self, layer: str, op: Compile) -> bool:
        """Count an op; returns whether it is the one that installs the result of all."""
        self.ops.append((layer, op))
        return self.last is not None and len(self.ops) >= self.last


class Ops:
    """The ops of one variant of a layer, over a view of the tree."""

    def __init__(
        self,
        layer: Layer,
        tree: Tree,
        sources: Sources,
        target: Target,
        env: Mapping[str, str],
        together: SharedStage,
    ) -> None:
        self.layer, self.sources, self.target, self.base_env = layer, sources, target, env
        self.together = together
        self.view = OverlayTree(tree)
        self.packages = versions(tree)
        self.receipts = receipts_of(tree)
        #: diffs that come after the op at hand in the same stack
        self.later: list[str] = []

    def judged(self, op: Op) -> OpResult:
        """Judge one op: its finding and its changes.

        Raises:
            ApplyError: it would write a path that is none of a file below site-packages.
        """
        method: Callable[[Any], OpResult] = getattr(self, f"op_{op.kind}")
        result = method(op)
        for path in result.changes:
            checked_path(path, f"layer {self.layer.name}: op {op.kind}")
        written = [path for path, content in result.changes.items() if content is not None]
        after = OverlayTree(self.view)
        after.update(result.changes)
        problem = collision(written, after)
        return OpResult(DRIFT, reason=problem) if problem else result

    def op_replace(self, op: Replace) -> OpResult:
        return edit_file(
            self.view,
            op.file,
            lambda text: replace_text(text, op.old, op.new, op.count),
        )

    def op_diff(self, op: Diff) -> OpResult:
        files = parse_diff(op.diff)
        result = judge_diff(files, self.view)
        if result.form in (PRE, POST) or not self.later:
            return result
        # later changes of the same stack may have edited this one's result
        below = judge_diff(files, undone(self.view, self.later))
        reason = "it is already applied, below later changes of its series"
        return OpResult(POST, reason=reason) if below.form == POST else result

    def op_graft(self, op: Graft) -> OpResult:
        pin = self._donor_pin(op)
        donor = self.sources.donor(pin)
        if op.whole:
            result = create_file(self.view, op.file, donor)
        else:
            try:
                text = donor.decode("utf-8")
            except UnicodeDecodeError:
                return OpResult(DRIFT, reason=f"{op.donor}: {op.donor_file} is not UTF-8 text")
            result = edit_file(
                self.view,
                op.file,
                lambda target: graft_text(target, text, op.names, op.after, op.replace),
            )
        result.inputs = [pin]
        return result

    def op_copy(self, op: Copy) -> OpResult:
        try:
            data = base64.b64decode(op.data, validate=True)
        except ValueError:
            raise ApplyError(
                f"layer {self.layer.name}: the data of {op.to} is not base64", EXIT_USAGE
            ) from None
        return create_file(self.view, op.to, data)

    def op_hook(self, op: Hook) -> OpResult:
        return edit_file(self.view, op.file, lambda text: run_hook(op.source, op.function, text))

    def op_env(self, op: Env) -> OpResult:
        name, value = op.name, op.value
        reader = op.reader
        data = self.view.read(reader)
        if data is None:
            return OpResult(DRIFT, reason=f"{reader}, which should read {name}, does not exist")
        text = data.decode("utf-8", "replace")
        if reader == "vllm/envs.py":
            try:
                envs = read_envs(text)
            except NOT_PYTHON as error:
                return OpResult(DRIFT, reason=f"{reader} is not Python: {error}")
            if name not in envs.known:
                near = difflib.get_close_matches(name, list(envs.known), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                return OpResult(
                    DRIFT,
                    reason=f"vllm {self.packages.get('vllm')} does not read {name} "
                    f"(not in {reader}){hint}",
                )
            choices = envs.known[name]
            if choices is not None and value not in choices:
                return OpResult(
                    DRIFT,
                    reason=f"{name}={value} is not a choice of vllm "
                    f"{self.packages.get('vllm')}: {', '.join(choices)}",
                )
        elif name not in text:
            return OpResult(DRIFT, reason=f"{reader} does not read {name}")
        finding = POST if self.base_env.get(name) == value else PRE
        return OpResult(finding, env={name: value})

    def op_pull(self, op: Pull) -> OpResult:
        raise ApplyError(
            f"layer {self.layer.name}: {op.pull} was not fetched before it was judged",
            EXIT_USAGE,
            f"spark-build plan --layers {self.layer.name}",
        )

    def _donor_pin(self, op: Graft) -> DonorPin:
        distribution, _, version = op.donor.partition("==")
        member = op.donor_file
        for pin in self.layer.pins.donor:
            same = normalize(pin.distribution) == normalize(distribution)
            if same and pin.version == version and pin.member == member:
                return pin
        raise ApplyError(
            f"layer {self.layer.name}: no pin for {member} of {op.donor}",
            EXIT_USAGE,
            f"spark-build layers pin {self.layer.name}",
        )

    # -- distributions

    def op_wheel(self, op: Wheel) -> OpResult:
        name = normalize(op.distribution)
        version = op.version or self.packages.get(normalize(op.version_of))
        if version is None:
            return OpResult(DRIFT, reason=f"{op.version_of} is not in the base")
        return self._installed(self._wheel_pin(name, version))

    def _installed(self, pin: InputPin) -> OpResult:
        """A pinned wheel, unpacked; another installed version of it is removed."""
        name, version = normalize(pin.distribution), pin.version
        members = self.sources.members(pin)
        installed = self.view.distributions().get(name)
        if installed and installed.version == version and self._wins(members):
            return OpResult(
                POST, reason=f"{name} {version} is installed and its files take precedence"
            )
        changes: Changes = {}
        if installed:
            changes.update(self._without(installed))
        for member in members:
            changes.update(self._laid_out(pin, member))
        info_dir = next(m.path.split("/")[0] for m in members if OWN_RECORD.fullmatch(m.path))
        changes[f"{info_dir}/INSTALLER"] = Content.of(INSTALLER)
        changes[f"{info_dir}/RECORD"] = self._record(members, info_dir)
        return OpResult(PRE, changes=self._minimal(changes), inputs=[pin])

    def op_remove(self, op: Remove) -> OpResult:
        installed = self.view.distributions().get(normalize(op.distribution))
        if installed is None:
            return OpResult(POST, reason=f"{op.distribution} is not in the base")
        if op.unless is not None and version_matches(installed.version, op.unless):
            return OpResult(POST, reason=f"{op.distribution} {installed.version} is allowed")
        return OpResult(PRE, changes=self._without(installed))

    def _wheel_pin(self, name: str, version: str) -> WheelPin:
        for pin in self.layer.pins.wheel:
            fits = (
                normalize(pin.distribution) == name
                and pin.version == version
                and pin.platform in ("any", self.target.platform)
                and pin.python in ("py3", self.target.python)
            )
            if fits:
                return pin
        raise ApplyError(
            f"layer {self.layer.name}: no pinned wheel of {name} {version} for "
            f"{self.target.platform} and {self.target.python}",
            EXIT_USAGE,
            f"spark-build layers pin {self.layer.name}",
        )

    def _wins(self, members: Iterable[Member]) -> bool:
        for member in members:
            if OWN_RECORD.fullmatch(member.path):
                continue
            path = self._site_path(member.path)
            if path is None:
                continue
            if not explained(path, member.sha256, self.view.digest(path), self.receipts):
                return False
        return True

    @staticmethod
    def _site_path(path: str) -> str | None:
        """Where a wheel member lies in site-packages; None for scripts, headers and data."""
        head, _, rest = path.partition("/")
        if not head.endswith(".data"):
            return path
        scheme, _, below = rest.partition("/")
        return below if scheme in ("purelib", "platlib") else None

    def _laid_out(self, pin: InputPin, member: Member) -> Changes:
        path = self._site_path(member.path)
        if path is None:
            return {}
        if member.size == 0:
            return {path: Content.of(b"", member.mode)}
        sources, name = self.sources, member.path
        content = Content(
            sha256=member.sha256,
            size=member.size,
            mode=member.mode,
            load=lambda: sources.member(pin, name),
            origin=f"{pin.filename}:{name}",
        )
        return {path: content}

    def _record(self, members: Sequence[Member], info_dir: str) -> Content:
        """The wheel's RECORD as an installer leaves it: laid-out paths, plus our INSTALLER."""
        lines = []
        own = f"{info_dir}/RECORD"
        rows = [(m.path, m.sha256, m.size) for m in members if m.path != own]
        rows.append((f"{info_dir}/INSTALLER", sha256_hex(INSTALLER), len(INSTALLER)))
        for name, digest, size in rows:
            path = self._site_path(name)
            if path is not None:
                lines.append(record_row(path, digest, size))
        return Content.of("\n".join([*lines, f"{info_dir}/RECORD,,", ""]).encode())

    def _without(self, dist: Distribution) -> Changes:
        """Deletes a distribution's files, except those that another distribution also owns."""
        shared: set[str] = set()
        for other in self.view.distributions().values():
            data = self.view.read(f"{other.info_dir}/RECORD") if other != dist else None
            if data is not None:
                shared.update(recorded_paths(data))
        gone: Changes = {}
        for row in record_of(self.view, dist):
            if row.path in shared or row.path.startswith(("/", "../")):
                continue
            if self.view.digest(row.path) is not None:
                gone[row.path] = None
        return {**gone, **dict.fromkeys(stale_pyc(self.view, gone))}

    def _minimal(self, changes: Changes) -> Changes:
        """Without the files that already have exactly these bytes, and their compiled files."""
        same = {
            path
            for path, content in changes.items()
            if content is not None and content.sha256 == self.view.digest(path)
        }
        same |= set(stale_pyc(self.view, same))
        return {path: content for path, content in changes.items() if path not in same}

    # -- compiled code

    def op_compile(self, op: Compile) -> OpResult:
        if not op.change or not op.code:  # of a pull request
            return self._compiled(op, op.reason, Compiled())
        code = self._code(op.code)
        compiled = Compiled(code)
        reason = describe_code(code, op.code.name)
        if code.how == RUNS and code.module.startswith(EXTENSION_WHEELS):
            return OpResult(POST, reason=reason, compiled=compiled)
        if code.how == RUNS and op.change.guard in (code.guard or ""):
            since = f"vLLM {op.change.applied_upstream}"
            return OpResult(UPSTREAM, reason=reason, since=since, compiled=compiled)
        if code.how in (RUNS, NO_CODE):
            return OpResult(NOT_APPLICABLE, reason=reason, compiled=compiled)
        return self._compiled(op, reason, compiled)

    def _compiled(self, op: Compile, reason: str, compiled: Compiled) -> OpResult:
        """A change to sources, compiled together with earlier ones, if allowed."""
        if not op.source:  # nothing that a stage takes
            return OpResult(NEEDS_REBUILD, reason=reason)
        ops = self.together.with_op(op)
        stage = self.sources.stage(ops, self.packages, self.target, self._extension)
        if stage is None:
            return OpResult(NEEDS_REBUILD, reason=reason, compiled=compiled)
        compiled = replace(compiled, sources=stage.sources)
        if isinstance(stage, Unstaged):
            return _unstaged(stage, compiled)
        if not self.together.add(self.layer.name, op):
            compiled = replace(compiled, carrier=self.together.carrier)
            return OpResult(PRE, reason=reason, compiled=compiled)
        if stage.refusal:
            return _unstaged(stage.refusal, replace(compiled, sources=stage.refusal.sources))
        standing, stranger = self._installed_wheels(stage.request.operators)
        if stranger:
            return OpResult(AMBIGUOUS, reason=stranger, compiled=compiled)
        compiled = replace(compiled, stage=stage.request, wheel=stage.wheel)
        if stage.wheel is None:
            return OpResult(PRE, reason=reason, compiled=compiled)
        result = self._installed(stage.wheel)
        self.together.compiled_folders |= {path.partition("/")[0] for path in result.changes}
        for dist in standing:
            if dist.name != normalize(stage.wheel.distribution):
                result.changes = {**self._without(dist), **result.changes}
        result.reason, result.inputs, result.compiled = reason, [], compiled
        return result

    def _installed_wheels(self, operators: Iterable[str]) -> tuple[list[Distribution], str]:
        """Extension wheels in the tree with any of these operators: those of layers that share
        the stage, and a message about others."""
        ours: list[Distribution] = []
        layers = {*self.together.layers(), self.layer.name}
        for name, dist in self.view.distributions().items():
            package = name.replace("-", "_")
            about = self.view.read(f"{package}/companion.json")
            if not package.startswith(EXTENSION_WHEELS) or about is None:
                continue
            try:
                both = {row["name"] for row in json.loads(about)["operators"]} & set(operators)
            except (ValueError, LookupError, TypeError, RecursionError):
                return [], f"{package}/companion.json in the base is damaged"
            if not both:
                continue
            owners = {r.layer for r in self.receipts if f"{dist.info_dir}/RECORD" in r.files}
            if not owners & layers:
                return [], (
                    f"{package} in the base registers {', '.join(sorted(both))} already, and of "
                    "two extension wheels one overrides the other: remove it, or start from a base "
                    "without it"
                )
            ours.append(dist)
        return ours, ""

    def _extension(self, name: str) -> str:
        """The sha256 of an extension module, such as ``vllm/_C``, or ''."""
        module = next(iter(self._modules([f"{name}.*"])), "")
        return self._module_digest(module) if module else ""

    def _code(self, wanted: Kernels) -> ModuleCode:
        """The first module that has some kernels, and how SM121 runs them."""
        known = {pin.sha256: pin for pin in self.layer.pins.code}
        seen: list[ModuleCode] = []
        for path in self._modules(wanted.modules):
            if path.partition("/")[0] in self.together.compiled_folders:
                continue
            digest = self._module_digest(path)
            code = known.get(digest) or self.sources.code(self.view, path, wanted, digest)
            seen.append(ModuleCode(path, digest, code.how, code.arch or None, code.guard or None))
            if code.how not in (ABSENT, NO_CODE):
                return seen[-1]
        return next((one for one in seen if one.how == ABSENT), ModuleCode("", "", NO_CODE))

    def _module_digest(self, path: str) -> str:
        """The sha256 of a large file: computed for a directory, else from RECORD.

        In an image, hashing it would mean reading a layer of gigabytes; level ``static`` holds
        every file of the built image against its RECORD.
        """
        tree: Tree = self.view
        while isinstance(tree, OverlayTree):
            tree = tree.base
        if not isinstance(tree, DirTree):
            dist = self.view.distributions()[normalize(self.layer.package)]
            rows = parse_record(self.view.read(f"{dist.info_dir}/RECORD") or b"")
            recorded = next((row.sha256 for row in rows if row.path == path), None)
            if recorded:
                return recorded
        return self.view.digest(path) or ""

    def _modules(self, patterns: Iterable[str]) -> Iterator[str]:
        for pattern in patterns:
            above, _, name = pattern.rpartition("/")
            for folder in fnmatch.filter(self.view.children(""), above):
                names = fnmatch.filter(self.view.children(folder), name)
                yield from (f"{folder}/{file}" for file in names if file.endswith(".so"))


def _unstaged(why: Unstaged, compiled: Compiled) -> OpResult:
    finding = SKIP if why.state in (UPSTREAM, NOT_APPLICABLE) else why.state
    return OpResult(finding, reason=why.reason, since=why.since, notes=why.notes, compiled=compiled)
