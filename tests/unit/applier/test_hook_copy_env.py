"""``hook``, ``copy``, ``env``, ``if`` and ``compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.edits import read_envs, run_hook
from builder.applier.judging import probe_holds
from builder.applier.layers import Clause
from builder.applier.states import (
    APPLIED,
    DRIFT,
    NEEDED,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
    POST,
    PRE,
)
from tests.unit.fakes import (
    BACKEND,
    ENVS,
    MemoryTree,
    Table,
    copy_op,
    env_op,
    judged,
    make_layer,
    replace_op,
    vllm_files,
)

if TYPE_CHECKING:
    from builder.applier.layers import Layer

# ------------------------------------------------------------------------------------------- hook


def hook(body: str) -> str:
    return f"def edit(text: str) -> str:\n    {body}\n"


SWAP = hook("return text.replace('cutlass', 'b12x')")


def test_a_hook_edits_and_recognises_its_own_edit() -> None:
    assert run_hook(SWAP, "edit", "x = 'cutlass'\n") == (PRE, "x = 'b12x'\n")
    assert run_hook(SWAP, "edit", "x = 'b12x'\n") == (POST, "x = 'b12x'\n")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return text + '#'", "not idempotent"),
        ("return None", "returned NoneType, not str"),
        ("return text.encode()", "returned bytes, not str"),
    ],
)
def test_a_bad_hook_is_drift(body: str, reason: str) -> None:
    found, why = run_hook(hook(body), "edit", "x\n")
    assert found == DRIFT
    assert reason in why


def hook_layer(source: str) -> Layer:
    op = {"op": "hook", "file": "vllm/core.py", "source": source, "function": "edit"}
    return make_layer("fix", op)


def test_a_hook_that_raises_is_drift_with_its_error() -> None:
    outcome = judged(hook_layer(hook("return text[text.index('gone'):]")), vllm_files())
    assert outcome.state == DRIFT
    assert "substring not found" in outcome.reason


def test_a_hook_that_breaks_the_syntax_is_drift() -> None:
    outcome = judged(hook_layer(hook("return text.replace('def run', 'def')")), vllm_files())
    assert (outcome.state, outcome.changes) == (DRIFT, {})
    assert "would no longer parse" in outcome.reason


# ------------------------------------------------------------------------------------------- copy


def test_copy_creates_and_never_overwrites() -> None:
    layer, tree = make_layer("add", copy_op("vllm/data.json", b"{}")), MemoryTree(vllm_files())
    outcome = judged(layer, tree)
    assert outcome.state == NEEDED
    assert judged(layer, tree.after(outcome)).state == APPLIED
    tree.files["vllm/data.json"] = b"[]"
    assert judged(layer, tree).state == DRIFT


# -------------------------------------------------------------------------------------------- env

MARLIN = env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")


def test_env_is_needed_until_the_base_sets_it() -> None:
    layer = make_layer("settings", MARLIN)
    outcome = judged(layer, vllm_files())
    assert (outcome.state, outcome.env) == (NEEDED, {"VLLM_NVFP4_GEMM_BACKEND": "marlin"})
    assert outcome.reason == "sets VLLM_NVFP4_GEMM_BACKEND=marlin"
    assert judged(layer, vllm_files(), env=outcome.env).state == APPLIED
    other = {"VLLM_NVFP4_GEMM_BACKEND": "cutlass"}
    assert judged(layer, vllm_files(), env=other).state == NEEDED


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        pytest.param(
            env_op("VLLM_NVFP4_GEMM_BACKENDS", "marlin"),
            "vllm 0.20.1 does not read VLLM_NVFP4_GEMM_BACKENDS (not in vllm/envs.py); "
            "did you mean VLLM_NVFP4_GEMM_BACKEND?",
            id="misspelt",
        ),
        pytest.param(env_op("VLLM_ZZZ", "1"), "does not read VLLM_ZZZ (not in", id="unknown"),
        pytest.param(
            env_op("VLLM_NVFP4_GEMM_BACKEND", "b12x"),
            "VLLM_NVFP4_GEMM_BACKEND=b12x is not a choice of vllm 0.20.1: cutlass, marlin",
            id="no-choice",
        ),
        pytest.param(
            env_op("FLASHINFER_X", "1", reader="flashinfer/env.py"),
            "flashinfer/env.py, which should read FLASHINFER_X, does not exist",
            id="no-reader",
        ),
        pytest.param(
            env_op("FLASHINFER_X", "1", reader="vllm/core.py"),
            "vllm/core.py does not read FLASHINFER_X",
            id="reader-does-not-read",
        ),
    ],
)
def test_an_env_that_the_base_would_not_read_is_drift(op: Table, reason: str) -> None:
    outcome = judged(make_layer("settings", op), vllm_files())
    assert outcome.state == DRIFT
    assert reason in outcome.reason


def test_another_reader_only_has_to_contain_the_name() -> None:
    op = env_op("FLASHINFER_X", "1", reader="vllm/reader.py")
    files = vllm_files(reader="import os\nX = os.environ.get('FLASHINFER_X')\n")
    assert judged(make_layer("settings", op), files).state == NEEDED


def test_a_variable_added_by_an_earlier_op_can_be_set() -> None:
    entry = '    "VLLM_NVFP4_GEMM_BACKEND": env_with_choices('
    bring = replace_op(entry, f'    "VLLM_NEW": None,\n{entry}', "vllm/envs.py")
    outcome = judged(make_layer("both", bring, env_op("VLLM_NEW", "1")), vllm_files())
    assert outcome.state == NEEDED


def test_choices_are_read_only_from_the_table() -> None:
    known = read_envs(ENVS).known
    assert known == {
        "VLLM_NVFP4_GEMM_BACKEND": ("cutlass", "marlin"),
        "VLLM_USE_FLASHINFER_MOE_FP4": None,
    }
    assert read_envs("other = {'VLLM_X': 1}\n").known == {}


def test_an_envs_module_that_is_not_python_is_drift() -> None:
    files = vllm_files() | {"vllm/envs.py": b"environment_variables = {\n"}
    assert judged(make_layer("settings", MARLIN), files).state == DRIFT


# ------------------------------------------------------------------------------ if, compile, probes


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        ({"vllm": ">=0.20.0"}, NEEDED),
        ({"vllm": ">=0.21.0"}, NOT_APPLICABLE),
        ({"flashinfer-python": ">=0.1.0"}, NOT_APPLICABLE),
        ({"vllm": ">=0.20.0", "flashinfer-python": ">=0.1.0"}, NOT_APPLICABLE),
    ],
)
def test_an_op_with_a_condition(condition: dict[str, str], state: str) -> None:
    assert judged(make_layer("fix", {**BACKEND, "if": condition}), vllm_files()).state == state


def test_one_skipped_op_leaves_the_others() -> None:
    skipped = {**replace_op("not there", "x"), "if": {"vllm": "<0.19.0rc0"}}
    outcome = judged(make_layer("fix", skipped, BACKEND), vllm_files())
    assert (outcome.state, list(outcome.changes)) == (NEEDED, ["vllm/core.py"])


def test_compiled_code_needs_a_rebuild() -> None:
    outcome = judged(make_layer("cuda", {"op": "compile", "reason": "csrc"}), vllm_files())
    assert (outcome.state, outcome.reason) == (NEEDS_REBUILD, "op 1 (compile ): csrc")


@pytest.mark.parametrize(
    ("clause", "holds"),
    [
        (Clause("vllm/core.py", contains="cutlass"), True),
        (Clause("vllm/core.py", contains="b12x"), False),
        (Clause("vllm/core.py", lacks="b12x"), True),
        (Clause("vllm/core.py", lacks="cutlass"), False),
        (Clause("vllm/gone.py", contains=""), False),
        (Clause("vllm/gone.py", lacks="x"), False),
        (Clause("vllm/gone.py", missing=True), True),
        (Clause("vllm/core.py", missing=True), False),
    ],
)
def test_probe_clauses(clause: Clause, holds: bool) -> None:
    tree = MemoryTree(vllm_files())
    assert probe_holds([clause], tree) is holds
    assert probe_holds([Clause("vllm/core.py", contains="BACKEND"), clause], tree) is holds


def test_a_binary_file_is_drift() -> None:
    files = vllm_files() | {"vllm/core.py": b"\xff\xfe"}
    outcome = judged(make_layer("fix", BACKEND), files)
    assert outcome.state == DRIFT
    assert "not UTF-8" in outcome.reason
