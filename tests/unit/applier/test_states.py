"""The seven states: a range only nominates, content decides, a receipt knows best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.applying import refuse
from builder.applier.judging import judge_in_order
from builder.applier.receipts import RECEIPTS
from builder.applier.states import (
    AMBIGUOUS,
    APPLIED,
    DRIFT,
    NEEDED,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
    STATES,
    UPSTREAM,
    Outcome,
)
from builder.applier.values import ApplyError
from tests.unit.fakes import (
    BACKEND,
    TARGET,
    FakeSources,
    MemoryTree,
    Table,
    altered,
    copy_op,
    env_op,
    judged,
    make_layer,
    replace_op,
    vllm_files,
)

if TYPE_CHECKING:
    from builder.applier.layers import Layer

BASE = vllm_files()
PATCHED = BASE | {"vllm/core.py": BASE["vllm/core.py"].replace(b"cutlass", b"b12x")}
FIXED = BASE | {"vllm/core.py": b"BACKEND = pick()\n"}
TWICE = BASE | {"vllm/core.py": BASE["vllm/core.py"] * 2}
OTHER = BASE | {"vllm/core.py": b"BACKEND = 'triton'\n"}


def upstream(contains: str, when: str = ">=0.20.0") -> Table:
    return {
        "when": {"vllm": when},
        "since": "vllm 0.20.0",
        "reason": "merged",
        "probe": [{"file": "vllm/core.py", "contains": contains}],
    }


FIX = make_layer("fix", BACKEND, upstream=[upstream("pick()")])


@pytest.mark.parametrize(
    ("layer", "files", "state", "reason"),
    [
        (FIX, BASE, NEEDED, "1 file to change"),
        (FIX, PATCHED, APPLIED, "already applied, byte for byte"),
        (FIX, FIXED, UPSTREAM, "merged"),
        (FIX, OTHER, DRIFT, "\"BACKEND = 'cutlass'\" not found; nearest is line 1"),
        (FIX, TWICE, AMBIGUOUS, "occurs 2 times, expected 1"),
        (make_layer("cuda", {"op": "compile"}), BASE, NEEDS_REBUILD, "compiled code"),
        (make_layer("fix", BACKEND, package="sglang"), BASE, NOT_APPLICABLE, "not in the base"),
    ],
    ids=STATES[:1] + STATES[1:3] + (DRIFT, AMBIGUOUS, NEEDS_REBUILD, NOT_APPLICABLE),
)
def test_each_state(layer: Layer, files: dict[str, bytes], state: str, reason: str) -> None:
    outcome = judged(layer, files)
    assert outcome.state == state
    assert reason in outcome.reason
    assert bool(outcome.changes) == (state == NEEDED)


@pytest.mark.parametrize(
    ("state", "code"),
    [(DRIFT, 4), (AMBIGUOUS, 4), (NEEDS_REBUILD, 10), *((s, None) for s in STATES[:4])],
)
def test_three_states_stop_a_build(state: str, code: int | None) -> None:
    outcome = Outcome("fix", state, "why")
    if code is None:
        refuse(outcome)
        return
    with pytest.raises(ApplyError, match=r"fix.*why") as caught:
        refuse(outcome)
    assert caught.value.code == code


def test_judging_writes_nothing() -> None:
    tree = MemoryTree(BASE)
    judged(FIX, tree)
    assert tree.files == BASE


# ------------------------------------------------------------------------------ ranges and probes


def test_outside_every_range_names_the_supported_versions() -> None:
    layer = make_layer("fix", BACKEND, variant={"when": {"vllm": ">=0.30.0", "lib": ">=2"}})
    outcome = judged(layer, BASE)
    assert outcome.state == NOT_APPLICABLE
    assert outcome.reason == (
        "made for vllm >=0.30.0, lib >=2; the base has lib absent, vllm 0.20.1"
    )


def test_a_declared_not_applicable_range_gives_its_reason() -> None:
    entry = {"when": {"vllm": "<0.21.0rc0"}, "reason": "too old"}
    outcome = judged(make_layer("fix", BACKEND, **{"not-applicable": [entry]}), BASE)
    assert (outcome.state, outcome.reason) == (NOT_APPLICABLE, "too old")


def test_a_release_that_should_have_the_fix_but_does_not_is_drift() -> None:
    layer = make_layer(
        "fix", BACKEND, variant={"when": {"vllm": "<0.20.0rc0"}}, upstream=[upstream("pick()")]
    )
    outcome = judged(layer, BASE)
    assert outcome.state == DRIFT
    assert outcome.reason == (
        "vllm 0.20.0 should have this fix, but its probe failed; "
        "expected: vllm/core.py contains 'pick()'"
    )


def test_a_probe_outside_its_range_is_not_run() -> None:
    layer = make_layer("fix", BACKEND, upstream=[upstream("BACKEND", when=">=0.21.0")])
    assert judged(layer, BASE).state == NEEDED


def test_upstream_names_the_first_release() -> None:
    assert judged(FIX, FIXED).since == "vllm 0.20.0"


def test_two_variants_that_match_are_an_error() -> None:
    both = [{"name": name, "when": {"vllm": ">=0.1"}, "ops": [BACKEND]} for name in "ab"]
    with pytest.raises(ApplyError, match="variants a and b both match"):
        judged(make_layer("fix", variants=both), BASE)


@pytest.mark.parametrize("version", ["0.20.1", "0.20.1+cu130", "0.20.1.post1", "0.20.1rc1"])
def test_local_post_and_pre_releases_are_in_range(version: str) -> None:
    layer = make_layer("fix", BACKEND, variant={"when": {"vllm": ">=0.20.1rc0,<0.21.0rc0"}})
    assert judged(layer, vllm_files(version)).state == NEEDED


# ------------------------------------------------------------------------------- all or nothing


TWO = make_layer("fix", BACKEND, replace_op("def run", "def start"))


def test_half_applied_is_drift_and_names_both_halves() -> None:
    outcome = judged(TWO, PATCHED)
    assert (outcome.state, outcome.changes) == (DRIFT, {})
    assert outcome.reason == (
        "partly applied: 1 (replace vllm/core.py) already in the base, 2 (replace vllm/core.py) not"
    )


def test_ops_see_the_result_of_earlier_ops() -> None:
    layer = make_layer("fix", BACKEND, replace_op("'b12x'", "'b12x'  # SM121"))
    content = judged(layer, BASE).changes["vllm/core.py"]
    assert content is not None
    assert content.read().startswith(b"BACKEND = 'b12x'  # SM121\n")


def test_drift_of_one_op_discards_all_changes() -> None:
    layer = make_layer("fix", BACKEND, copy_op("vllm/new.py", b""), replace_op("gone", "never"))
    outcome = judged(layer, BASE)
    assert (outcome.state, outcome.changes) == (DRIFT, {})
    assert outcome.reason.startswith("op 3 (replace vllm/core.py)")


def test_a_present_change_with_a_missing_setting_only_sets_it() -> None:
    layer = make_layer("fix", BACKEND, env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"))
    outcome = judged(layer, PATCHED)
    assert (outcome.state, outcome.changes) == (NEEDED, {})
    assert outcome.env == {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}


@pytest.mark.parametrize("new", ["def run(:", "def run():\n    a = 1\n    global a\n"])
def test_an_edit_that_breaks_the_syntax_is_drift(new: str) -> None:
    outcome = judged(make_layer("fix", replace_op("def run():", new)), BASE)
    assert (outcome.state, outcome.changes) == (DRIFT, {})
    assert "vllm/core.py would no longer parse" in outcome.reason


def test_flags_alone_are_a_change() -> None:
    layer = make_layer("flags", variant={"serve-flags": ["--linear-backend", "cutlass"]})
    outcome = judged(layer, BASE)
    assert (outcome.state, outcome.reason) == (NEEDED, "settings only: --linear-backend cutlass")


# ------------------------------------------------------------------------------ order and receipts


def steps_of(layers: list[Layer], tree: MemoryTree, env: dict[str, str] | None = None) -> list[Any]:
    return list(judge_in_order(layers, tree, FakeSources(), TARGET, env or {}))


def committed(layers: list[Layer], tree: MemoryTree) -> MemoryTree:
    """The tree with every needed layer and its receipt in it."""
    for step in steps_of(layers, tree):
        tree = tree.after(step)
    return tree


SECOND = make_layer("second", replace_op("'b12x'", "'b12x'  # by second"))


def test_a_layer_is_judged_after_the_layers_before_it() -> None:
    assert judged(SECOND, BASE).state == DRIFT
    states = [step.outcome.state for step in steps_of([FIX, SECOND], MemoryTree(BASE))]
    assert states == [NEEDED, NEEDED]


def test_receipts_explain_a_file_that_two_layers_changed() -> None:
    tree = committed([FIX, SECOND], MemoryTree(BASE))
    again = [step.outcome for step in steps_of([FIX, SECOND], tree)]
    assert [outcome.state for outcome in again] == [APPLIED, APPLIED]
    assert again[0].reason == "receipt found, 1 file matches it"


def test_without_its_receipt_the_overwritten_change_is_drift() -> None:
    """The negative of the test above: the receipt is what makes the difference."""
    tree = committed([FIX, SECOND], MemoryTree(BASE))
    del tree.files[f"{RECEIPTS}/fix.json"]
    del tree.files[f"{RECEIPTS}/second.json"]
    tree.files["vllm/core.py"] = b"BACKEND = 'b12x2'\n"
    assert judged(FIX, tree).state == DRIFT


def test_a_receipt_does_not_cover_a_later_edit() -> None:
    tree = committed([FIX], MemoryTree(BASE))
    tree.files["vllm/core.py"] = OTHER["vllm/core.py"]
    assert judged(FIX, tree).state == DRIFT


def test_a_receipt_comes_before_the_upstream_probe() -> None:
    layer = make_layer("fix", BACKEND, upstream=[upstream("BACKEND = 'b12x'")])
    tree = committed([layer], MemoryTree(BASE))
    assert judged(layer, tree).state == APPLIED
    assert judged(layer, PATCHED).state == UPSTREAM


def test_a_receipt_of_an_older_layer_version_is_ignored() -> None:
    tree = committed([FIX], MemoryTree(BASE))
    newer = altered(FIX, summary="said better")
    assert judged(newer, tree).reason == "the change is already applied, byte for byte"
    other = make_layer("fix", replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x-2'"))
    assert judged(other, tree).state == DRIFT


def test_a_receipt_counts_only_while_its_variables_are_set() -> None:
    layer = make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"))
    tree = committed([layer], MemoryTree(BASE))
    env = {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}
    assert judged(layer, tree, env=env).state == APPLIED
    assert judged(layer, tree).state == NEEDED


def test_variables_of_one_layer_are_visible_to_the_next() -> None:
    layers = [make_layer(name, env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")) for name in "ab"]
    states = [step.outcome.state for step in steps_of(layers, MemoryTree(BASE))]
    assert states == [NEEDED, APPLIED]


MARLIN = env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")
CUTLASS = env_op("VLLM_NVFP4_GEMM_BACKEND", "cutlass")


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            (MARLIN,),
            (CUTLASS,),
            "a sets VLLM_NVFP4_GEMM_BACKEND=marlin, b sets VLLM_NVFP4_GEMM_BACKEND=cutlass",
        ),
        (
            ("--linear-backend", "marlin"),
            ("--linear-backend=cutlass",),
            "a sets --linear-backend marlin, b sets --linear-backend cutlass",
        ),
        (("--x",), ("--x", "1"), "a sets --x, b sets --x 1"),
        (("--x", "1", "--y"), ("--y", "--x=1"), None),
        ((MARLIN,), (MARLIN,), None),
    ],
)
def test_layers_that_set_the_same_to_different_values(
    one: tuple[Any, ...], other: tuple[Any, ...], said: str | None
) -> None:
    layers = [
        make_layer(
            name,
            *(setting for setting in settings if not isinstance(setting, str)),
            variant={"moe-serve-flags": [x for x in settings if isinstance(x, str)]},
        )
        for name, settings in zip("ab", (one, other), strict=True)
    ]
    if said is None:
        assert len(steps_of(layers, MemoryTree(BASE))) == 2
        return
    with pytest.raises(ApplyError, match="layers a and b contradict each other: ") as caught:
        steps_of(layers, MemoryTree(BASE))
    assert str(caught.value).endswith(said)
    assert caught.value.code == 2


def test_a_damaged_receipt_is_named() -> None:
    tree = committed([FIX], MemoryTree(BASE))
    tree.files[f"{RECEIPTS}/fix.json"] = b"{"
    with pytest.raises(ApplyError, match=r"receipts/fix\.json is damaged"):
        judged(FIX, tree)
