"""Mends a layer that drifted: its files are unpacked, edited, and the edit becomes a variant.

The ops that still fit stay as they are.  The edit is what was changed beside them: it becomes a
graft, a replacement or a diff, for the releases whose files it fits.
"""

from __future__ import annotations

import datetime
import shlex
import shutil
import subprocess
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from msgspec import Meta, structs
from msgspec import field as default
from packaging.version import Version

from builder import settings
from builder.applier.diff import parse_diff
from builder.applier.edits import judge_file
from builder.applier.files import DOCUMENT, read_regular
from builder.applier.judging import judge, judge_in_order
from builder.applier.layers import Copy, Diff, Graft, Hook, Layer, Pull, Replace
from builder.applier.ops import Ops, SharedStage
from builder.applier.states import AMBIGUOUS, APPLIED, DRIFT, NEEDED, PRE, SKIP
from builder.applier.trees import OverlayTree, Tree
from builder.applier.values import ApplyError, all_match, path_problem
from builder.common.console import console, counted
from builder.common.document import Document, Part, Text
from builder.common.files import write_atomically
from builder.common.hints import again
from builder.common.paths import data_dir
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import Exit, SparkBuildError, UsageError
from builder.layers import edited
from builder.layers.catalog import Catalog, Selection, has_pulls
from builder.layers.edited import EditedFile, EditOps, Section
from builder.layers.layerfile import load_layer, open_ended
from builder.layers.pinned import IndexSources
from builder.layers.pulls import spans, without_pulls
from builder.pipeline import bases
from builder.pipeline.checking import LayerFinding, before_of, findings
from builder.pipeline.pins import check_layer, write_pins

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.layers import Op, Variant
    from builder.applier.states import OpResult, Target
    from builder.images.subject import Subject
    from builder.pipeline.options import DiffOptions


class RedoneOp(Part, frozen=True, kw_only=True):
    """An op that does not fit the base, and why."""

    op: Annotated[Text, Meta(description="its number and kind, and what it changes")]
    reason: Text


class LayerDiff(Document, frozen=True, kw_only=True):
    """A layer's files unpacked for an edit, or the variant that an edit became."""

    name: Text
    base: Text
    state: Literal["unpacked", "written"]
    folder: Annotated[Text, Meta(description="of the files to edit, or of the layer")]
    files: Annotated[tuple[Text, ...], Meta(description="that the edit may change, or changed")]
    kept: Annotated[int, Meta(ge=0, description="ops that fit the base and stay as they are")]
    redone: tuple[RedoneOp, ...]
    ops: Annotated[tuple[Text, ...], Meta(description="the new ops, in words")] = ()
    variant: str = ""
    when: Annotated[dict[str, str], Meta(description="the releases that it is for")] = default(
        default_factory=dict
    )
    fits: Annotated[str, Meta(description="all releases that it would fit")] = ""

    findings: Annotated[
        tuple[LayerFinding, ...], Meta(description="what layers check finds in the layer now")
    ] = ()

    def lines(self) -> Iterator[str]:
        """What was done, as text, and the next command."""
        if self.state == "unpacked":
            yield f"{self.folder}: {counted(len(self.files), 'file')} to edit, below edit/"
            yield from (f"  {path}" for path in self.files)
            yield f"{counted(self.kept, 'op')} of {self.name} fit and are in them already; not:"
            yield from (f"  op {one.op}: {one.reason}" for one in self.redone)
            return
        ranges = ", ".join(f"{name} {spec}" for name, spec in self.when.items())
        yield f"{self.folder}: variant {self.variant} for {ranges}"
        yield from (f"  {op}" for op in self.ops)
        yield f"the edit fits {self.fits}"


# ------------------------------------------------------------------------------------ the workplace


@dataclass(kw_only=True)
class _Workplace:
    """A base with the other layers and the ops that fit, and what is left to do."""

    layer: Layer
    variant: Variant | None
    #: with the other layers and the ops that stay
    tree: OverlayTree
    #: the same, and those hunks of the others that fit
    start: OverlayTree
    packages: Mapping[str, str]
    target: Target
    env: Mapping[str, str]
    unchanged: set[int] = field(default_factory=set)
    left: dict[int, OpResult] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)

    def redone(self) -> Iterator[RedoneOp]:
        ops = self.variant.ops if self.variant else ()
        for number, result in self.left.items():
            op = ops[number]
            yield RedoneOp(
                op=f"{number + 1} ({op.kind} {op.subject})",
                reason=result.reason or "the base has it already",
            )

    def condition(self) -> Mapping[str, str]:
        """The ``if`` of all ops that are done anew, if they have the same one."""
        ops = self.variant.ops if self.variant else ()
        conditions = [dict(ops[number].when) for number in self.left]
        same = conditions and all(one == conditions[0] for one in conditions)
        return conditions[0] if same else {}


def _variant_for(layer: Layer, packages: Mapping[str, str]) -> Variant | None:
    """The variant of a base, or else the last one that is for an older release."""
    matching = [v for v in layer.variants if all_match(v.when, packages)]
    return next(reversed(matching or [*layer.variants]), None)


def _workplace(
    layer: Layer, others: Sequence[Layer], base: Subject, sources: IndexSources, *, scratch: bool
) -> _Workplace:
    """Apply the other layers, and each op that fits; with ``scratch`` no op stays."""
    target, env = base.identity.platform.target, base.identity.env
    below = OverlayTree(base.tree)
    for step in judge_in_order(others, base.tree, sources, target, env):
        if step.outcome.state == NEEDED and not step.outcome.pending:
            below.update(step.changes)
        elif step.outcome.state in (DRIFT, AMBIGUOUS):
            console.warn(f"layer {step.layer.name} does not fit the base either")
    variant = _variant_for(layer, base.identity.packages)
    run = Ops(layer, below, sources, target, env, SharedStage(last=1, carrier=layer.name))
    unchanged: set[int] = set()
    left: dict[int, OpResult] = {}
    files: dict[str, None] = {}
    start = OverlayTree(run.view)
    for number, op in enumerate(variant.ops if variant else ()):
        files.update(dict.fromkeys(_files_of(op)))
        if not all_match(op.when, run.packages):
            unchanged.add(number)
            continue
        result = Ops(layer, start, sources, target, env, run.together).judged(op)
        textual = bool(_files_of(op))
        if result.form in (PRE, SKIP) and not (scratch and textual):
            unchanged.add(number)
            run.view.update(result.changes)
        elif result.form == PRE:
            start.update(result.changes)
        elif textual:
            left[number] = result
            _apply_parts(op, start)
        else:
            unchanged.add(number)
    tree = below
    tree.update(run.view.changes)
    return _Workplace(
        layer=layer, variant=variant, tree=tree, start=start, packages=run.packages, target=target,
        env=env, unchanged=unchanged, left=left, files=files,
    )  # fmt: skip


def _files_of(op: Op) -> list[str]:
    """The files whose text an op changes."""
    if isinstance(op, Diff):
        return [change.path for change in parse_diff(op.diff)]
    if isinstance(op, Copy):
        return [op.to]
    return [op.file] if isinstance(op, (Replace, Graft, Hook)) else []


def _edits_text(op: Op) -> bool:
    return isinstance(op, Pull) or bool(_files_of(op))


def _apply_parts(op: Op, tree: OverlayTree) -> None:
    """Apply the hunks of a diff that fit by themselves."""
    for change in parse_diff(op.diff) if isinstance(op, Diff) else ():
        for hunk in change.hunks:
            result = judge_file(replace(change, hunks=(hunk,)), tree)
            if result.form == PRE:
                tree.update(result.changes)


# ------------------------------------------------------------------------------------ the two calls


def mend(options: DiffOptions) -> LayerDiff:
    """Unpack a layer's files for an edit, or turn the edit into a variant of the layer.

    Raises:
        UsageError: the layer fits the base as it is, nothing was edited, or there is no editor.
        SparkBuildError: the layer with the edit does not fit the base (exit 4).
    """
    catalog = Catalog.discover(options.patches)
    catalog.say_shadows([options.name])
    layer = catalog.layer(options.name)
    others = _others(catalog, layer, options.layers)
    selection = without_pulls(Selection((*others, layer), ()))
    whole = next(one for one in selection.layers if one.name == layer.name)
    others = [one for one in selection.layers if one.name != layer.name]
    index = PackageIndex(refresh=options.refresh)
    sources = IndexSources(index)
    with closing(
        bases.identify_base(Ref(options.base), selection, index, platform=options.platform)
    ) as base:
        place = _workplace(whole, others, base, sources, scratch=has_pulls(layer))
        if has_pulls(layer) and place.variant:
            own = next(v for v in layer.variants if v.name == place.variant.name)
            place.unchanged = {n for n, op in enumerate(own.ops) if not _edits_text(op)}
        _add_files(place, options.file)
        work = _Work(options, catalog.folders[layer.name], place, others, index, sources, base)
        if not (place.left or options.file or has_pulls(layer)):
            return work.widen()
        if options.edit is not None and not options.edit.exists():
            return work.unpack(options.edit)
        if options.edit is not None:
            return work.finish(options.edit)
        with tempfile.TemporaryDirectory(prefix="spark-build-") as name:
            folder = Path(name) / "edit"
            work.unpack(folder)
            _open_editor([folder / "edit" / path for path in place.files])
            return work.finish(folder)


def _others(catalog: Catalog, layer: Layer, names: Sequence[str]) -> list[Layer]:
    """The layers to apply first: those that were named, or those that the layer comes after."""
    if names:
        chosen = catalog.select(names).layers
        before = [one.name for one in chosen]
        if layer.name in before:
            return list(chosen[: before.index(layer.name)])
        return list(chosen)
    return before_of(catalog, layer)


def _add_files(place: _Workplace, files: Sequence[str]) -> None:
    for path in files:
        if problem := path_problem(path):
            raise UsageError(f"--file {path!r:.100} is not below site-packages: it {problem}")
        place.files[path] = None
    if not place.files:
        raise UsageError(
            f"layer {place.layer.name} changes no file, so there is nothing to edit",
            hint=again("--file", "vllm/..."),
        )


def _open_editor(files: Sequence[Path]) -> None:
    """Open the files that exist in the user's editor, and wait for it.

    Raises:
        UsageError: there is none, or it failed.
    """
    editor = shlex.split(settings.VISUAL.value or settings.EDITOR.value)
    hint = again("--edit", "work")
    if not editor:
        raise UsageError("no editor: neither VISUAL nor EDITOR is set", hint=hint)
    try:
        done = subprocess.run([*editor, *(f for f in files if f.exists())], check=False)
    except OSError as error:
        raise UsageError(f"editor {editor[0]}: {error.strerror}", hint=hint) from None
    if done.returncode:
        raise UsageError(f"editor {editor[0]} ended with {done.returncode}; nothing was changed")


class _Candidate(NamedTuple):
    """A layer folder with the edit in it, before it replaces the layer's own."""

    parts: list[Section]
    files: Mapping[str, bytes]
    variant: str
    when: dict[str, str]


@dataclass(frozen=True)
class _Work:
    """One layer to mend on one base."""

    options: DiffOptions
    home: Path
    place: _Workplace
    others: Sequence[Layer]
    index: PackageIndex
    sources: IndexSources
    base: Subject

    @property
    def layer(self) -> Layer:
        return self.place.layer

    @property
    def version(self) -> str:
        """The version of the layer's package in the base.

        Raises:
            UsageError: the base lacks it.
        """
        version = self.place.packages.get(self.layer.package)
        if version is None:
            raise UsageError(f"{self.options.base} has no {self.layer.package}")
        return version

    def document(self, state: Literal["unpacked", "written"], folder: Path) -> LayerDiff:
        return LayerDiff(
            name=self.layer.name,
            base=self.options.base,
            state=state,
            folder=str(folder),
            files=tuple(self.place.files),
            kept=len(self.place.unchanged),
            redone=tuple(self.place.redone()),
        )

    # -- the folder to edit

    def unpack(self, folder: Path) -> LayerDiff:
        """Write each file twice: as it is, and to be edited; and what does not fit any more."""
        for name, tree in (("before", self.place.tree), ("edit", self.place.start)):
            for path in self.place.files:
                data = tree.read(path)
                if data is not None:
                    write_atomically(folder / name / path, data)
                else:
                    console.warn(f"{path} is not in the base")
                    (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "README", self._readme().encode())
        return self.document("unpacked", folder)

    def _readme(self) -> str:
        fitting = len(self.place.unchanged)
        lines = [
            f"Layer {self.layer.name} on {self.options.base}, {self.layer.package} {self.version}.",
            f"Edit the files below edit/. {fitting} ops fit and are in them already.",
            "Those that do not fit:",
        ]
        ops = self.place.variant.ops if self.place.variant else ()
        for number, one in zip(self.place.left, self.place.redone(), strict=True):
            op = ops[number]
            lines += ["", f"op {one.op}: {one.reason}"]
            for key in ("old", "new", "diff"):
                if text := getattr(op, key, ""):
                    lines += [f"--- {key}", text.rstrip("\n")]
        return "\n".join(lines) + "\n"

    # -- the edit

    def finish(self, folder: Path) -> LayerDiff:
        """Turn the edit into a variant, and write it if the layer then fits the base."""
        edits = list(self._edits(folder))
        changed = [edit for edit in edits if edit.before != edit.after]
        if not changed:
            raise UsageError(
                f"nothing was edited below {folder / 'edit'}", hint="edit the files, and run again"
            )
        ops = edited.ops_of_edit(changed, self._variant_name(), self._donors, self.layer.package)
        return self._written(self._conditional(ops), changed)

    def widen(self) -> LayerDiff:
        """Let a variant whose ops all fit be for the base too.

        Raises:
            UsageError: it is for it already.
        """
        if self._state(self.layer, self.base.tree) == NEEDED:
            raise UsageError(
                f"layer {self.layer.name} fits {self.options.base}: there is nothing to fix",
                hint=again("--file", "vllm/..."),
            )
        return self._written(EditOps(), [])

    def _written(self, ops: EditOps, changed: Sequence[EditedFile]) -> LayerDiff:
        """The layer with these ops for the releases that they fit."""
        fits = self._fits(ops)
        run = edited.run_around(list(fits), fits, self.version)
        low, high = edited.range_of(run, list(fits))
        candidate = self._candidate(self._variant_name(), ops, low, high, run)
        self._write(candidate, changed)
        return structs.replace(
            self.document("written", self.home),
            files=tuple(edit.path for edit in changed),
            ops=tuple(_in_words(op.keys) for op in ops.ops),
            variant=candidate.variant,
            when=candidate.when,
            fits=spans(list(fits), fits, wanted=True),
            findings=tuple(findings(load_layer(self.home), open_ended(self.home))),
        )

    def _edits(self, folder: Path) -> Iterator[EditedFile]:
        """Every file below ``edit``, with its text in the base.

        Raises:
            UsageError: the folder is of another base, or a file is not UTF-8 text.
        """
        place = folder / "edit"
        if not place.is_dir():
            raise UsageError(f"{folder} exists, and has no folder edit of this command")
        there = {p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()}
        for path in dict.fromkeys([*self.place.files, *sorted(there)]):
            data = self.place.tree.read(path)
            file = folder / "before" / path
            before = read_regular(file, DOCUMENT) if file.exists() else None
            if path in self.place.files and data != before:
                raise UsageError(
                    f"{folder} is of another base: {path} differs from {self.options.base}",
                    hint="name another folder with --edit",
                )
            new = read_regular(place / path, DOCUMENT) if path in there else None
            try:
                texts = [None if side is None else side.decode() for side in (data, new)]
            except UnicodeDecodeError:
                raise UsageError(f"{path} is not UTF-8 text") from None
            yield EditedFile(path=path, before=texts[0], after=texts[1])

    def _conditional(self, ops: EditOps) -> EditOps:
        condition = self.place.condition()
        if not condition:
            return ops
        conditional = (replace(op, keys={**op.keys, "if": dict(condition)}) for op in ops.ops)
        return replace(ops, ops=tuple(conditional))

    def _variant_name(self) -> str:
        """The old name with this release: ``vllm-0.28`` becomes ``vllm-0.34``."""
        stem = self.place.variant.name.rpartition("-")[0] if self.place.variant else ""
        name = f"{stem or self.layer.package}-{'.'.join(map(str, Version(self.version).release))}"
        taken = {variant.name for variant in self.layer.variants}
        return name if name not in taken else f"{name}-mended"

    # -- releases

    @cached_property
    def _trees(self) -> dict[str, Tree]:
        """The releases of the layer's package, oldest first, and the base, with their files."""
        released = bases.ReleasedTrees(
            package=self.layer.package,
            selection=Selection((self.layer, *self.others), ()),
            index=self.index,
            platform=self.options.platform,
        )
        trees = dict(released.trees(self.options.releases))
        trees[self.version] = self.base.tree
        return {version: trees[version] for version in sorted(trees, key=Version)}

    def _donors(self, path: str) -> Iterator[tuple[str, str]]:
        """The text of a file in each other release, the nearest first."""
        versions = list(self._trees)
        at = versions.index(self.version)
        for version in sorted(versions, key=lambda v: abs(versions.index(v) - at)):
            data = self._trees[version].read(path) if version != self.version else None
            if data is not None:
                with suppress(UnicodeDecodeError):
                    yield version, data.decode()

    def _fits(self, ops: EditOps) -> dict[str, bool]:
        """Whether each release needs the new variant: it fits, and the layer as it is does not."""
        fits: dict[str, bool] = {}
        with tempfile.TemporaryDirectory(prefix="spark-build-") as name:
            home = Path(name) / self.layer.name
            keep = self._candidate("every", ops, "0rc0", "99999rc0", list(self._trees))
            layer = self._load(home, keep)
        variant = next(v for v in layer.variants if v.name == keep.variant)
        alone = replace(
            layer,
            upstream=(),
            not_applicable=(),
            variants=(replace(variant, when={self.layer.package: ">=0"}),),
        )
        for version, tree in self._trees.items():
            console.detail(f"judging {self.layer.package} {version}")
            states = [self._state(one, tree) for one in (alone, self.layer)]
            newer = Version(version) >= Version(self.version)
            fits[version] = states[0] == NEEDED and (
                states[1] in (DRIFT, AMBIGUOUS) or (newer and states[1] != NEEDED)
            )
        if not fits[self.version]:
            self._refuse(alone)
        return fits

    def _state(self, layer: Layer, tree: Tree) -> str:
        steps = judge_in_order(
            [*self.others, layer], tree, self.sources, self.place.target, self.place.env
        )
        try:
            return list(steps)[-1].outcome.state
        except ApplyError as error:
            console.detail(f"{layer.name}: {error}")
            return DRIFT

    def _refuse(self, layer: Layer) -> None:
        steps = list(
            judge_in_order(
                [*self.others, layer], self.base.tree, self.sources, self.place.target,
                self.place.env,
            )
        )  # fmt: skip
        outcome = steps[-1].outcome
        if outcome.state == NEEDED:
            raise UsageError(f"layer {layer.name} fits {self.options.base} as it is")
        raise SparkBuildError(
            f"layer {layer.name} with the edit is {outcome.state} on {self.options.base}: "
            f"{outcome.reason}; nothing was written",
            Exit.DRIFT,
            hint=f"spark-build layers show {layer.name}",
        )

    # -- layer.toml

    def _candidate(
        self, name: str, ops: EditOps, low: str, high: str, run: Sequence[str]
    ) -> _Candidate:
        """The layer's folder with the new variant for ``[low, high)``, and other ranges without."""
        package = self.layer.package
        parts = edited.sections(read_regular(self.home / "layer.toml", DOCUMENT).decode())
        places = dict(
            zip((v.name for v in self.layer.variants), edited.variants_in(parts), strict=True)
        )
        when = {package: f">={low},<{high}"}
        others: dict[str, str] = {}
        new: list[Section] = []
        end = len(parts)
        if self.place.variant is not None:
            at, of_ops = places[self.place.variant.name]
            others = {k: v for k, v in self.place.variant.when.items() if k != package}
            when = {**when, **others}
            new = [_renamed(parts[at], name).setting(
                "when", edited.when_line(package, when[package], others))]  # fmt: skip
            new += [parts[p] for n, p in enumerate(of_ops) if n in self.place.unchanged]
            end = max([place for _, ofs in places.values() for place in (_, *ofs)]) + 1
            new[0] = self._with_origin(new[0], run)
        new += [Section(header="variant.op", lines=(f"{edited.op_text(op)}\n",)) for op in ops.ops]
        wider = "" if ops.ops else self._widened(low, high)
        own = places[self.place.variant.name] if self.place.variant and wider else (-1, [])
        spread = [
            (
                at,
                [part] if at in (own[0], *own[1]) else self._narrowed(parts, at, places, low, high),
            )
            for at, part in enumerate(parts)
        ]
        before = [s for at, pieces in spread if at < end for s in pieces]
        rest = [s for at, pieces in spread if at >= end for s in pieces]
        if self.place.variant is not None and wider:
            old = parts[own[0]]
            widened = old.setting("when", edited.when_line(package, wider, others))
            before = [widened if part is old else part for part in before]
            when[package] = wider
            return _Candidate([*before, *rest], {}, self.place.variant.name, when)
        return _Candidate([*_spaced(before), *new, *rest], ops.files, name, when)

    def _widened(self, low: str, high: str) -> str:
        """The variant's range with ``[low, high)``, if no release is between them; or ""."""
        spec = self.place.variant.when.get(self.layer.package, "") if self.place.variant else ""
        _, last = edited.ends(spec)
        if not last:
            return ""
        between = (v for v in self._trees if Version(last) <= Version(v) < Version(low))
        if next(between, None) is not None:
            return ""
        return edited.up_to(spec, max(last, high, key=Version))

    def _with_origin(self, part: Section, run: Sequence[str]) -> Section:
        today = datetime.datetime.now(datetime.UTC).date()
        digest = self.base.identity.digest[:19]
        read = f"{run[0]} to {run[-1]}" if len(run) > 1 else run[0]
        lines = [line for line in part.lines if not line.startswith("#")]
        comment = (
            f"# Made on {today} from {self.options.base} ({digest}); fits {self.layer.package} "
            f"{read}.\n"
        )
        return replace(part, lines=(comment, *lines))

    def _narrowed(
        self,
        parts: Sequence[Section],
        at: int,
        places: Mapping[str, tuple[int, list[int]]],
        low: str,
        high: str,
    ) -> list[Section]:
        """A table as it stays; with its ops, if it is a variant's."""
        part = parts[at]
        package = self.layer.package
        if part.header == "provenance":
            today = datetime.datetime.now(datetime.UTC).date()
            return [part.setting("last-update", f"last-update = {today.isoformat()}\n")]
        if part.header == "not-applicable":
            entry = self.layer.not_applicable[_number(parts, at)]
            pieces = _pieces(entry.when, package, low, high)
            lines = [edited.when_line(package, p, _others_of(entry.when, package)) for p in pieces]
            unchanged = pieces == [entry.when.get(package)]
            return [part] if unchanged else [part.setting("when", line) for line in lines]
        if not part.header.startswith("variant"):
            return [part]
        name = next(n for n, (top, ofs) in places.items() if at in (top, *ofs))
        if at != places[name][0]:
            return []
        variant = next(v for v in self.layer.variants if v.name == name)
        own = [parts[place] for place in places[name][1]]
        pieces = _pieces(variant.when, package, low, high)
        if pieces == [variant.when.get(package)]:
            return [part, *own]
        sections: list[Section] = []
        for number, piece in enumerate(pieces):
            line = edited.when_line(package, piece, _others_of(variant.when, package))
            head = part if not number else _renamed(part, f"{name}-again")
            sections += [head.setting("when", line), *own]
        return sections

    # -- the layer's folder

    def _load(self, home: Path, candidate: _Candidate) -> Layer:
        """The candidate as a layer, in a folder of its own, with its inputs pinned."""
        shutil.copytree(self.home, home)
        for name, data in candidate.files.items():
            (home / name).write_bytes(data)
        (home / "layer.toml").write_text("".join(s.text for s in candidate.parts), "utf-8")
        layer = load_layer(home)
        if any(op.kind == "graft" for op in layer.ops):
            from builder.common.forge import Forges, PullStore

            write_pins(home, layer, self.index, PullStore(Forges(())))
            layer = load_layer(home)
        if any(isinstance(op, Pull) for op in layer.ops):
            layer = without_pulls(Selection((layer,), ())).layers[0]
        return layer

    def _write(self, candidate: _Candidate, edits: Sequence[EditedFile]) -> None:
        """Write the candidate over the layer, if it makes the edit and knows it when applied."""
        with tempfile.TemporaryDirectory(prefix="spark-build-") as name:
            home = Path(name) / self.layer.name
            layer = self._load(home, candidate)
            check_layer(layer)
            patched = OverlayTree(self.base.tree)
            steps = list(
                judge_in_order(
                    [*self.others, layer], self.base.tree, self.sources, self.place.target,
                    self.place.env,
                )
            )  # fmt: skip
            for step in steps[:-1]:
                patched.update(step.changes)
            outcome = steps[-1].outcome
            patched.update(outcome.changes)
            after = judge(layer, patched, self.sources, self.place.target, self.place.env)
            wrong = [edit.path for edit in edits if not _has(patched, edit)]
            if outcome.state != NEEDED or after.state != APPLIED or wrong:
                problem = f"{outcome.state}: {outcome.reason}" if outcome.state != NEEDED else (
                    f"{', '.join(wrong)} would differ from the edit" if wrong
                    else f"applied, it is {after.state}: {after.reason}"
                )  # fmt: skip
                raise SparkBuildError(
                    f"layer {layer.name} with the edit on {self.options.base}: {problem}; nothing "
                    "was written",
                    Exit.DRIFT,
                    hint="edit other lines than those that the layer's other ops change",
                )
            for path in sorted(home.rglob("*"), key=lambda p: p.name == "layer.toml"):
                own = self.home / path.relative_to(home)
                if path.is_file() and (not own.is_file() or own.read_bytes() != path.read_bytes()):
                    write_atomically(own, path.read_bytes())


def follows_from(home: Path) -> str:
    """The command that writes what follows from a shipped layer; empty for a user's own."""
    shipped = home.parent == data_dir("patches")
    return "python -m tests.generate --all" if shipped else ""


def _has(tree: Tree, edit: EditedFile) -> bool:
    """Whether a tree has the edited text; a graft may have other empty lines around it."""
    data = tree.read(edit.path)
    if data is None or edit.after is None:
        return data is None and edit.after is None
    sides = ([x for x in text.splitlines() if x.strip()] for text in (data.decode(), edit.after))
    return next(sides) == next(sides)


def _in_words(keys: Mapping[str, object]) -> str:
    what = {
        "replace": f"one anchor of {str(keys.get('old', '')).count(chr(10))} lines in",
        "diff": "a diff:",
        "copy": "a new file:",
        "graft": f"{', '.join(map(str, keys.get('names', ('the file',))))} "  # type: ignore[call-overload]
        f"out of {keys.get('from')}, in",
    }[str(keys["op"])]
    return f"{keys['op']}: {what} {keys.get('file', keys.get('to'))}"


def _number(parts: Sequence[Section], at: int) -> int:
    return sum(part.header == parts[at].header for part in parts[:at])


def _pieces(when: Mapping[str, str], package: str, low: str, high: str) -> list[str]:
    return edited.without(when[package], low, high) if package in when else []


def _others_of(when: Mapping[str, str], package: str) -> dict[str, str]:
    return {name: spec for name, spec in when.items() if name != package}


def _renamed(part: Section, name: str) -> Section:
    return part.setting("name", f'name = "{name}"\n')


def _spaced(parts: Sequence[Section]) -> Sequence[Section]:
    """The parts, with an empty line at the end."""
    if not parts or parts[-1].text.endswith("\n\n"):
        return parts
    end = "\n" if parts[-1].text.endswith("\n") else "\n\n"
    return [*parts[:-1], replace(parts[-1], lines=(*parts[-1].lines, end))]
