"""Files that are not what a layer was made for: said so, with the text, and nothing written.

Every text op of every layer is tried on the real file of a release that needs it, with one thing
changed in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.applying import apply_layers
from builder.applier.diff import first_line
from builder.applier.edits import top_level
from builder.applier.judging import judge
from builder.applier.layers import Clause, counts
from builder.applier.states import AMBIGUOUS, APPLIED, DRIFT, NEEDED, UPSTREAM
from builder.applier.trees import DirTree, versions
from builder.applier.values import ApplyError, all_match
from builder.errors import Exit
from builder.layers.catalog import Catalog

from .cli import called
from .states import expected
from .support import PROFILE_OF, lay_out, probed_files, snapshot, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.applier.states import Outcome
    from builder.layers.pinned import IndexSources

    from .support import Planned, Planner

    Edit = Callable[[str], str | None]

CATALOG = Catalog.discover()
VLLM = expected()["vllm"]


def ops_of(*kinds: str) -> list[tuple[str, str, int]]:
    """(layer, variant, number) of every op of these kinds."""
    return [
        (layer, variant.name, number)
        for layer in CATALOG.folders
        for variant in CATALOG.layer(layer).variants
        for number, op in enumerate(variant.ops)
        if op.kind in kinds
    ]


@dataclass(frozen=True)
class Case:
    """A layer, the files it needs on disk as the layers before it leave them, and one op."""

    made: Planned
    layer: str
    op: Any
    root: Path
    sources: IndexSources

    @property
    def file(self) -> str:
        """The file that the op edits."""
        return str(self.op.file)

    def mutate(self, edit: Edit) -> None:
        """Change the op's file; None takes it away."""
        target = self.root / self.file
        new = edit(target.read_text("utf-8"))
        target.unlink()
        if new is not None:
            write(self.root, self.file, new.encode())

    def judge(self) -> Outcome:
        """The layer's state on disk."""
        tree = DirTree(self.root)
        target = self.made.plan.base.platform.target
        return judge(self.made.decision(self.layer).layer, tree, self.sources, target)

    def refused(self, state: str, *texts: str) -> None:
        """It ends in that state, says these texts, exits with 4, and writes nothing."""
        before = snapshot(self.root)
        outcome = self.judge()
        assert outcome.state == state, outcome.reason
        assert outcome.changes == {}
        for text in texts:
            assert text in outcome.reason, outcome.reason
        layer = self.made.decision(self.layer).layer
        target = self.made.plan.base.platform.target
        with pytest.raises(ApplyError) as refusal:
            apply_layers(self.root, [layer], self.sources, target)
        assert refusal.value.code == Exit.DRIFT
        assert self.layer in str(refusal.value)
        assert outcome.reason in str(refusal.value)
        assert snapshot(self.root) == before


@pytest.fixture(scope="module")
def needing(planned: Planner) -> Callable[[str, str, int], Planned]:
    """The first release that needs an op, as it is planned."""

    @cache
    def find(layer: str, variant: str, number: int) -> Planned:
        for _, release in VLLM.needed([layer]):
            made = planned(f"pypi:vllm=={release}", PROFILE_OF.get(layer, layer))
            decision = made.decision(layer)
            if decision.outcome.variant != variant:
                continue
            (ops,) = (v.ops for v in decision.layer.variants if v.name == variant)
            if counts(ops[number], versions(made.before(layer))):
                return made
        pytest.fail(f"no release needs op {number} of variant {variant} of {layer}")

    return find


@pytest.fixture
def case(
    needing: Callable[[str, str, int], Planned],
    sources: IndexSources,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Case:
    """The real files for one op."""
    layer, variant, number = request.param
    made = needing(layer, variant, number)
    decision = made.decision(layer)
    assert decision.outcome.state == NEEDED
    files = set(decision.outcome.changes) | probed_files(decision.layer)
    lay_out(made.before(layer), files, tmp_path)
    chosen = next(v for v in decision.layer.variants if v.name == variant)
    return Case(made, layer, chosen.ops[number], tmp_path, sources)


def replaces(function: Callable[[Case], None]) -> Callable[[Case], None]:
    """Run a test for every ``replace`` op."""
    return pytest.mark.parametrize("case", ops_of("replace"), indirect=True)(function)


def grafts(function: Callable[[Case], None]) -> Callable[[Case], None]:
    """Run a test for every ``graft`` op."""
    return pytest.mark.parametrize("case", ops_of("graft"), indirect=True)(function)


@pytest.mark.parametrize("op", ops_of("replace", "diff", "graft", "copy", "hook"))
def test_a_release_needs_every_text_op(
    needing: Callable[[str, str, int], Planned], op: tuple[str, str, int]
) -> None:
    """What none needs is dead, and the tests below would not try it."""
    assert needing(*op)


@replaces
def test_the_anchor_is_missing(case: Case) -> None:
    """The message shows the line of the expected text that is not there."""
    wanted = [line.strip() for line in case.op.old.splitlines()]
    case.mutate(lambda text: text.replace(case.op.old, "\n"))
    case.refused(DRIFT, case.file, "not found")
    reason = case.judge().reason
    assert any(repr(line) in reason for line in wanted if line), reason


@replaces
def test_the_anchor_differs_slightly(case: Case) -> None:
    """The message shows the nearest line too, with its number; a twin of the text may be nearer."""
    wanted = first_line(case.op.old)
    near = wanted.replace("_", "__", 2) if "_" in wanted else wanted + "  # edited"
    twins = (case.root / case.file).read_text("utf-8").count(wanted) > 1
    case.mutate(lambda text: text.replace(case.op.old, case.op.old.replace(wanted, near)))
    shown = () if twins else (repr(wanted), near)
    case.refused(DRIFT, "nearest is line ", *shown)


@replaces
def test_the_anchor_occurs_twice(case: Case) -> None:
    count = case.op.count
    case.mutate(lambda text: text + "\n" + case.op.old)
    case.refused(AMBIGUOUS, case.file, f"occurs {count + 1} times, expected {count}")


@replaces
def test_the_file_is_missing(case: Case) -> None:
    case.mutate(lambda text: None)
    case.refused(DRIFT, f"{case.file} does not exist")


@replaces
def test_the_file_is_not_text(case: Case) -> None:
    write(case.root, case.file, b"\xff\xfe not UTF-8")
    case.refused(DRIFT, case.file)


def is_alone(case: Case) -> bool:
    """Whether the op is the only text op here of its variant, so that it cannot be half applied."""
    present = versions(case.made.before(case.layer))
    variants = case.made.decision(case.layer).layer.variants
    # the same op may be in another variant
    ops = ([op for op in v.ops if counts(op, present)] for v in variants)
    return any(len(made) == 1 and made[0] is case.op for made in ops)


@replaces
def test_a_partly_applied_layer(case: Case) -> None:
    """One of its edits is already in the base: all or nothing, and it says which."""
    case.mutate(lambda text: text.replace(case.op.old, case.op.new))
    if is_alone(case):
        assert case.judge().state == APPLIED
        return
    case.refused(DRIFT, "partly applied", "already in the base", case.file)


@replaces
def test_an_edit_that_would_not_parse(case: Case) -> None:
    """The anchor is there, but the file around it is broken: found before anything is written."""
    assert case.file.endswith(".py"), "a text op on another kind of file needs its own test"
    case.mutate(lambda text: text + "\ndef broken(:\n")
    outcome = case.judge()
    assert outcome.state == DRIFT
    assert case.file in outcome.reason
    assert "parse" in outcome.reason or "not Python" in outcome.reason


@grafts
def test_a_graft_into_an_existing_file(case: Case) -> None:
    """A new module already exists with different content, or a definition is, with another body."""
    if case.op.whole:
        write(case.root, case.file, b"# something else\n")
        case.refused(DRIFT, case.file, "already exists with different content")
        return
    name = case.op.names[0]
    case.mutate(lambda text: text + f"\n\ndef {name}() -> None:\n    pass\n")
    case.refused(DRIFT, f"{name} is already defined")


@grafts
def test_a_graft_without_its_neighbour(case: Case) -> None:
    """A definition after which the graft belongs was renamed upstream."""
    after = case.op.after
    if after is None:
        return  # it goes to the end of the file, or is a file of its own
    case.mutate(lambda text: text.replace(after, f"{after}_v2"))
    case.refused(DRIFT, f"belongs after {after}, which is not defined")


# ----------------------------------------------------------------------- fixes that should be there


def upstream_probes() -> list[tuple[str, str, int]]:
    """(layer, base, number of the clause) for the probe of each layer that a release satisfies."""
    bases = [
        ("cutlass-dsl-cu13", "pypi:vllm==0.33.0"),
        ("cutlass-dsl-sm121a", "pypi:vllm==0.33.0"),
        ("flashinfer-b12x", "pypi:vllm==0.33.0"),
        ("flashinfer-sm121", "pypi:vllm==0.24.0"),
        ("flashinfer-narrow-experts", "pypi:vllm==0.31.0"),
        ("flashinfer-b12x-store-wait", "pypi:vllm==0.29.0"),
        # the release counts the warps, and later splits the experts
        ("flashinfer-b12x-moe-rows", "pypi:vllm==0.29.0"),
        ("flashinfer-b12x-moe-rows", "pypi:vllm==0.33.0"),
        ("vllm-b12x-backend", "pypi:vllm==0.22.0"),
        ("vllm-b12x-reachable", "pypi:vllm==0.28.0"),
        ("vllm-linear-fallback", "pypi:vllm==0.28.0"),
    ]
    longest = {n: max(len(e.probe) for e in CATALOG.layer(n).upstream) for n, _ in bases}
    return [(name, ref, i) for name, ref in bases for i in range(longest[name])]


@pytest.mark.parametrize(("layer", "ref", "number"), upstream_probes())
def test_a_missing_upstream_fix(
    planned: Planner, sources: IndexSources, tmp_path: Path, layer: str, ref: str, number: int
) -> None:
    """In range by its version, but not by its content: never called upstream, never patched."""
    made = planned(ref, "b12x-full")
    decision = made.decision(layer)
    assert decision.outcome.state == UPSTREAM
    packages = made.plan.base.packages
    entry = next(e for e in decision.layer.upstream if all_match(e.when, packages))
    if number >= len(entry.probe):
        return  # this form of the fix has fewer signs than the other one
    lay_out(made.before(layer), probed_files(decision.layer), tmp_path)
    clause = entry.probe[number]
    spoil(tmp_path, clause)
    case = Case(made, layer, clause, tmp_path, sources)
    case.refused(DRIFT, "should have this fix", clause.file, entry.since or "")


def spoil(root: Path, clause: Clause) -> None:
    """Make one clause of a probe untrue."""
    path = root / clause.file
    if clause.missing:
        write(root, clause.file, b"")
    elif clause.contains is not None:
        path.write_text(path.read_text("utf-8").replace(clause.contains, "# gone\n"), "utf-8")
    else:
        path.write_text(path.read_text("utf-8") + f"\n# {clause.lacks}\n", "utf-8")


def test_an_unpatched_file_in_a_release_that_should_have_the_fix(
    planned: Planner, sources: IndexSources, tmp_path: Path
) -> None:
    """0.22.0's version with 0.21.0's file, as in a build of one's own from an older branch."""
    new = planned("pypi:vllm==0.22.0", "b12x-full")
    old = planned("pypi:vllm==0.21.0", "b12x-full")
    layer = "vllm-b12x-backend"
    lay_out(new.before(layer), probed_files(new.decision(layer).layer), tmp_path)
    path = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
    data = old.base.tree.read(path)
    assert data is not None
    assert "FlashInferB12xNvFp4LinearKernel" not in top_level(data.decode())
    write(tmp_path, path, data)
    Case(new, layer, Clause(path), tmp_path, sources).refused(DRIFT, path)


# ------------------------------------------------------------------------------ as a user meets it


def test_apply_refuses_the_whole_profile(planned: Planner, tmp_path: Path) -> None:
    """One drifted layer stops all of them, before the first byte."""
    site = tmp_path / "site-packages"
    made = planned("pypi:vllm==0.24.0", "b12x-full")
    files = {p for d in made.plan.decisions for p in probed_files(d.layer)}
    lay_out(made.base.tree, files | set(made.plan.changes), site)
    path = site / "vllm/model_executor/kernels/linear/__init__.py"
    anchor = "possible = list(_POSSIBLE_NVFP4_KERNELS.get(platform, []))"
    assert anchor in path.read_text()
    path.write_text(path.read_text().replace(anchor, anchor.replace("possible", "possibly")))
    before = snapshot(site)
    ran = called("apply", str(site), "--layers", "b12x-full", cwd=tmp_path)
    assert ran.code == 4, ran.err
    assert f"{anchor!r} not found; nearest is line" in ran.err
    assert "possibly = list(_POSSIBLE_NVFP4_KERNELS" in ran.err
    assert ran.err.count("error:") == 1
    assert snapshot(site) == before
