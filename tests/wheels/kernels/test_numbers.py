"""Level ``numbers`` on released wheels: what is right, and the defects that it finds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import Content, OverlayTree
from builder.proof import kernels
from builder.proof.kernels import (
    LAUNCHED,
    MOE_LAYER,
    Launched,
    Replies,
    Reply,
    launch_in_sandbox,
    launch_request,
)
from builder.proof.necessity import put_together
from builder.proof.numbers import UNWRITTEN, check_numbers, judged
from builder.proof.opening import target_of_plan
from builder.proof.target import Origin
from builder.proof.trust import TrustedSources
from builder.ptx.source import kernels_of
from tests.wheels.support import replies_of

from .mutated import LaunchedAlone, without_effect

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.proof.replies import LaunchReply
    from builder.ptx.source import Instruction
    from tests.wheels.support import Planner

LAYER = "vLLM's NVFP4 linear layer"
EXPERTS_LAYER = "vLLM's NVFP4 experts"
RIGHT = {
    LAYER,
    EXPERTS_LAYER,
    *(f"b12x GEMM, tile {tile}" for tile in ("128x128", "64x128", "128x64", "64x64")),
    "b12x GEMM, 1 token",
    "b12x GEMM, special values",
}
SEVERAL = {
    "b12x GEMM, several tiles a block",
    *(f"b12x GEMM, several tiles of {tile} a block" for tile in ("128x128", "128x64", "64x64")),
}
MANY = "b12x MoE, many tokens"
MOE = {"b12x MoE, 1 token", "b12x MoE, 64 tokens", MANY}
#: An expert has more than 32 rows, in a tile of 64.
ROWS = "b12x MoE, 64 tokens"
#: Those for experts at most 512 wide, which do without tensor cores.
NARROW = {"b12x MoE, 1 token, narrow experts", "b12x MoE, 2 tokens, narrow experts"}
#: 96 and more rows of an expert: FlashInfer has a kernel of its own for that, from 0.6.18 on.
ROWS_96 = "b12x MoE, prefill"


def test_values_of_b12x_full_on_0_20_1(planned: Planner) -> None:
    made = planned("pypi:vllm==0.20.1")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    checks = {check.name: check for check in check_numbers(target)}
    assert set(checks) == {*RIGHT, *SEVERAL, *MOE, *NARROW, ROWS_96, "W4A16 linear layers"}
    assert "Marlin" in checks["W4A16 linear layers"].reason
    for name in (*NARROW, ROWS_96):
        assert checks[name].moot, "FlashInfer 0.6.9 has no such kernel"
    for name in RIGHT:
        check = checks[name]
        assert check.status == "pass", check.seen
        words = r"[1-9]\d+ values right, in \d+ launch(es)? and 3 schedules each; no race"
        assert re.match(words, check.seen)
        assert any("its functions record launches" in words for words in check.simulated)
        operators = [words for words in check.simulated if words.startswith("torch.ops._C.scaled")]
        assert operators == ["torch.ops._C.scaled_fp4_quant.out: a reference, on the CPU"]
    for name in {*SEVERAL, *MOE}:  # right with what the layers below fix
        assert checks[name].status == "pass", checks[name].seen
    for name in RIGHT - {"b12x GEMM, special values", LAYER, EXPERTS_LAYER}:
        ran, blocks = map(int, re.findall(r"(\d+) of (\d+) basic blocks", checks[name].seen)[0])
        assert ran >= 0.97 * blocks, "the shapes reach nearly all of the kernel"


DENSE = r"flashinfer/gemm/kernels/dense_blockscaled_gemm_sm120\.py:\d+"
STORE, COPY = (rf"line \d+ \({by}, {DENSE}\)" for by in (r"warp \d", "asynchronous copy"))
SCATTER = {
    "b12x MoE, 1 token": "moe_micro_kernel",
    "b12x MoE, 64 tokens": "moe_static_kernel",
    MANY: "moe_dynamic_kernel",
}
WARP = r"line \d+ \(warp \d, flashinfer/fused_moe/[a-z0-9_/]+/{}\.py:\d+\)"
A16 = "flashinfer/gemm/kernels/cute_dsl/dense_gemm_bf16_fp4_sm12x.py"
A16_SEVERAL = "W4A16 GEMM, several tiles a block"
A16_RACE = (
    rf"race, write while a copy may still read: line \d+ \(warp \d, {re.escape(A16)}:\d+\) and "
    rf"line \d+ \(asynchronous copy, {re.escape(A16)}:\d+\)"
)
#: FlashInfer 0.6.18.post1 multiplies words of its workspace that no thread wrote by zero.
NAN = r"(\d+) of \1 values wrong, \1 of them NaN"
#: FlashInfer before 0.6.18 computes 32 of a tile's 64 rows.
HALF = r"1[12]\d{3} of 32768 values wrong"
NEWEST = "pypi:vllm==0.33.0"
#: A release of FlashInfer that no vLLM pins yet.
AHEAD = "pypi:vllm==0.33.0,flashinfer-python==0.7.4"
#: FlashInfer 0.6.18.post1.
UNPADDED = "pypi:vllm==0.30.0"
#: layer -> kernel -> in which schedules its values are wrong without the layer, and what is seen
DEFECTS = {
    "flashinfer-b12x-moe-barrier": {
        name: (
            "wrong values in 3 runs of 3",
            f"race, read without order after a write: {WARP.format(file)} and {WARP.format(file)}",
        )
        for name, file in SCATTER.items()
    },
    # by luck right where stores happen at once
    "flashinfer-b12x-store-wait": dict.fromkeys(
        SEVERAL,
        ("(lazy, random 1)", f"race, write while a copy may still read: {STORE} and {COPY}"),
    ),
    "flashinfer-w4a16-store-wait": {A16_SEVERAL: ("(lazy)", A16_RACE)},
    "flashinfer-narrow-experts": dict.fromkeys(NARROW, ("wrong values in 3 runs of 3", NAN)),
    "flashinfer-b12x-moe-rows": {ROWS: ("wrong values in 3 runs of 3", HALF)},
}
#: The release whose FlashInfer has the defect, where that is not the one of 0.20.1.
AFFECTED = {"flashinfer-w4a16-store-wait": NEWEST, "flashinfer-narrow-experts": UNPADDED}


@pytest.mark.parametrize("layer", DEFECTS)
def test_without_the_layer_the_values_are_wrong(
    layer: str, planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that a layer is necessary: a FlashInfer with all the others."""
    assert set(SCATTER) == MOE
    defects = DEFECTS[layer]
    affected = tuple(one for one in LAUNCHED if one.name in defects)
    monkeypatch.setattr(kernels, "LAUNCHED", affected)
    made = planned(AFFECTED.get(layer, "pypi:vllm==0.20.1"))
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    target = replace(target, origin=Origin(subject=made.base, sources=planned.sources))
    rest = [other for other in target.layers if other.name != layer]
    assert len(rest) == len(target.layers) - 1
    checks = {one.name: one for one in check_numbers(put_together(made.base, target, rest, layer))}
    assert {one.name for one in checks.values() if one.status != "not-run"} == set(defects)
    for name, (schedules, seen) in defects.items():
        assert checks[name].status == "fail"
        assert schedules in checks[name].seen
        assert re.search(seen, checks[name].seen), checks[name].seen
        assert ("race" in checks[name].seen) == ("race" in seen), checks[name].seen


#: More than 128 pairs of token and expert get a tile of 128 rows, of which 64 were computed.
WIDE = {"kind": "moe-b12x", "tokens": [72], "experts": 2, "hidden": 256, "sms": 4}


def test_a_tile_of_128_rows_needs_the_layer_too(planned: Planner) -> None:
    """FlashInfer 0.6.16.post3, with all layers of the profile and with all others."""
    made = planned("pypi:vllm==0.28.0")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    target = replace(target, origin=Origin(subject=made.base, sources=planned.sources))
    rest = [layer for layer in target.layers if layer.name != "flashinfer-b12x-moe-rows"]
    without = put_together(made.base, target, rest, "flashinfer-b12x-moe-rows")
    kernel = Launched(name="wide", serves="nvfp4-moe", request=WIDE)
    for tried, wrong in ((target, False), (without, True)):
        (reply,) = replies_of(tried, launch_request(made.plan.env, "sm_121a", [kernel])).replies
        assert not reply.error
        runs = [run for ran in reply.ran for run in ran.runs if run.values]
        assert [(run.values, bool(run.wrong), judged(run)) for run in runs] == [
            (72 * 256, wrong, ())
        ] * 3


def test_the_kernel_for_narrow_experts_is_right_and_its_mutants_are_not(
    planned: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer 0.7.2.post1 with the layers of the profile; mutants of what it launched."""
    made = planned("pypi:vllm==0.33.0")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    (one,) = (one for one in LAUNCHED if one.name == "b12x MoE, 1 token, narrow experts")
    alone = LaunchedAlone.of(target, one, tmp_path / "kept", monkeypatch)
    assert "moe_direct_micro_kernel" in alone.ran.kernel
    assert [(run.values, run.wrong, run.fault) for run in alone.ran.runs] == [(512, 0, "")] * 3
    assert not any(judged(run) for run in alone.ran.runs)
    alone.check_mutants(NARROW_MUTANTS)


def test_narrow_experts_are_right_with_the_layer(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer 0.6.18.post1 with all layers of the profile."""
    narrow = tuple(one for one in LAUNCHED if one.name in NARROW)
    monkeypatch.setattr(kernels, "LAUNCHED", narrow)
    made = planned(UNPADDED)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    checks = {one.name: one for one in check_numbers(target)}
    for name in NARROW:
        assert checks[name].status == "pass", checks[name].seen


NEEDED = Path(__file__).parents[2] / "unit" / "golden" / "ptx_instructions.txt"


@pytest.mark.parametrize("release", ["pypi:vllm==0.20.1", UNPADDED, "pypi:vllm[b12x]==0.33.0"])
def test_the_list_of_needed_instructions_is_complete(
    release: str, planned: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/unit/ptx/test_ptx_instructions.py`` looks whether each is implemented and tested."""
    made = planned(release)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    monkeypatch.setenv("SPARK_BUILD_KEEP_LAUNCHES", str(tmp_path / "kept"))

    def recorded(reply: LaunchReply, _jobs: int, _torch: str) -> Replies:
        # an error, so that it is not kept as a result
        nothing = tuple(Reply(error="not run", stage="test", ran=()) for _ in reply.kernels)
        return Replies(replies=nothing, versions=reply.versions, simulated=())

    monkeypatch.setattr(kernels, "_run_all", recorded)
    list(check_numbers(target))
    texts = {path.read_text("utf-8") for path in (tmp_path / "kept").rglob("kernel.ptx")}
    parsed = [kernel for text in texts for kernel in kernels_of(text).values()]
    found = {one.name for kernel in parsed for one in kernel.code}
    assert len(found) > 100
    assert found <= set(NEEDED.read_text("utf-8").split())


def _instead(opcode: str, *modifiers: str) -> Callable[[Instruction], Instruction]:
    return lambda one: replace(one, opcode=opcode, modifiers=modifiers)


#: What is made of all instructions of a name, and what notices that.
NARROW_MUTANTS = {
    "bar.sync": (without_effect, "race"),
    "setp.lt.bf16": (_instead("setp", "gt", "bf16"), "numbers"),
    "mul.rn.f64": (_instead("sub", "rn", "f64"), "numbers"),
    "cvt.rn.f16x2.e2m1x2": (_instead("cvt", "u32", "u8"), "numbers"),
    "atom": (without_effect, "deadlock"),
    # without the layer, the one before a block counts itself as ready is missing
    "membar.gl": (without_effect, "race"),
}


@pytest.mark.parametrize("release", [NEWEST, AHEAD])
def test_every_kernel_of_the_newest_release_is_right(release: str, planned: Planner) -> None:
    """FlashInfer 0.7.2.post1 and 0.7.4 with all layers of the profile."""
    made = planned(release)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    checks = {check.name: check for check in check_numbers(target)}
    wrong = {name: one.seen for name, one in checks.items() if one.status != "pass"}
    assert not wrong
    assert set(checks) >= {one.name for one in LAUNCHED}


#: FlashInfer's experts of bfloat16 activations and FP4 weights: the name of the kernel.
A16_KERNEL = "W4A16FusedMoeKernel"
FORCED = {"FLASHINFER_B12X_FORCE_MOE_W4A16": "1"}


def test_w4a16_experts_are_right_but_for_what_vllm_rounds(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that FP4 holds are right; of others it is seen that vLLM lets them be rounded."""
    (experts,) = (one for one in LAUNCHED if one.serves == "w4a16-moe")
    monkeypatch.setattr(kernels, "LAUNCHED", (experts,))
    made = planned(NEWEST)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    (check,) = check_numbers(target)
    assert check.status == "pass", check.seen
    assert "the activations are rounded to FP4" in check.seen
    finer = replace(experts, request={**experts.request, "finer": True})
    for more, kernel, wrong in (({}, "MoEMicroKernel", True), (FORCED, A16_KERNEL, False)):
        request = launch_request({**target.plan.env, **more}, "sm_121a", [finer], BACKENDS)
        (reply,) = replies_of(target, request).replies
        (ran,) = reply.ran
        assert kernel in ran.kernel
        assert {bool(run.wrong) for run in ran.runs} == {wrong}, reply
        assert {run.values for run in ran.runs} == {256}
        assert {run.fault for run in ran.runs} == {""}


def test_both_kinds_of_vllms_experts_run_in_one_process(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.23.0 keeps the function of FlashInfer that it found first."""
    experts = tuple(one for one in LAUNCHED if one.request["kind"] == MOE_LAYER)
    monkeypatch.setattr(kernels, "LAUNCHED", experts)
    made = planned("pypi:vllm==0.23.0")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    seen = {check.name: (check.status, check.seen) for check in check_numbers(target)}
    for name in (EXPERTS_LAYER, "vLLM's W4A16 experts"):
        assert seen[name][0] == "pass", seen


#: One token and three have kernels of their own; the routes of more are sorted first.
A16_EXPERTS = {
    "kind": "moe-b12x",
    "mode": "w4a16",
    "tokens": [1, 3, 24],
    "experts": 4,
    "hidden": 256,
    "sms": 2,
}


@pytest.mark.parametrize(
    "release", ["pypi:vllm==0.23.0", "pypi:vllm==0.28.0", UNPADDED, NEWEST, AHEAD]
)
def test_flashinfers_own_w4a16_experts_are_right(release: str, planned: Planner) -> None:
    """FlashInfer 0.6.12, 0.6.16.post3, 0.6.18.post1, 0.7.2.post1 and 0.7.4."""
    made = planned(release)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    kernel = Launched(name="experts", serves="w4a16-moe", request=A16_EXPERTS)
    (reply,) = replies_of(target, launch_request(target.plan.env, "sm_121a", [kernel])).replies
    assert not reply.error
    assert any(A16_KERNEL in ran.kernel for ran in reply.ran)
    runs = [run for ran in reply.ran for run in ran.runs]
    assert {(run.fault, run.wrong) for run in runs} == {("", 0)}
    assert {run.values for run in runs if run.values} == {256, 3 * 256, 24 * 256}
    kinds = {race.kind for run in runs for race in judged(run)}
    assert kinds == {UNWRITTEN}, "rows that no token needs"


#: Experts whose scales FlashInfer 0.7.4 takes as a checkpoint has them.
ODD_WIDTHS = (
    {"tokens": [40], "experts": 3, "hidden": 256, "intermediate": 192, "sms": 4},
    {"tokens": [1, 3], "experts": 6, "top_k": 4, "intermediate": 320, "narrow": True, "sms": 8},
)


def test_experts_of_odd_widths_are_right_in_the_newest_flashinfer(planned: Planner) -> None:
    made = planned(AHEAD)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    wanted = [
        Launched(name=f"odd {number}", serves="nvfp4-moe", request={"kind": "moe-b12x", **ask})
        for number, ask in enumerate(ODD_WIDTHS)
    ]
    replies = replies_of(target, launch_request(target.plan.env, "sm_121a", wanted)).replies
    for reply, name in zip(replies, ("MoEStaticKernel", "MoEDirectMicroKernel"), strict=True):
        assert not reply.error
        assert all(name in ran.kernel for ran in reply.ran)
        runs = [run for ran in reply.ran for run in ran.runs]
        assert {(run.fault, run.wrong) for run in runs} == {("", 0)}
        assert {race.kind for run in runs for race in judged(run)} <= {UNWRITTEN}
        assert sum(run.values for run in runs) > 0


FUSED = "flashinfer/fused_moe/cute_dsl/blackwell_sm12x"
DYNAMIC = f"{FUSED}/moe_dynamic_kernel.py"
BARRIER = "cute.arch.sync_threads()"
(MANY_TOKENS,) = (one for one in LAUNCHED if one.name == MANY)
(PREFILL,) = (one for one in LAUNCHED if one.name == ROWS_96)


@pytest.mark.parametrize("release", [NEWEST, AHEAD])
def test_experts_for_prefill_have_a_kernel_of_their_own(release: str, planned: Planner) -> None:
    made = planned(release)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    (reply,) = replies_of(target, launch_request(target.plan.env, "sm_121a", [PREFILL])).replies
    assert not reply.error
    (ran,) = reply.ran
    assert "MoEGatedDynamicKernel" in ran.kernel
    assert {(run.fault, run.wrong, run.values) for run in ran.runs} == {("", 0, 136 * 256)}
    assert {race.kind for run in ran.runs for race in judged(run)} <= {UNWRITTEN}


@pytest.mark.parametrize(
    ("release", "path", "before", "missing", "kernel", "race"),
    [
        ("pypi:vllm==0.20.1", DYNAMIC, "# The leader writes the next number here:", BARRIER,
         MANY_TOKENS, "write without order after a read"),
        ("pypi:vllm==0.20.1", DYNAMIC, "# The leader asks again, and writes the answer here:",
         BARRIER, MANY_TOKENS, "write without order after a read"),
        (NEWEST, f"{FUSED}/moe_w4a16_kernel.py", "once the last block has seen the count",
         "threadfence()", Launched(name="a16", serves="w4a16-moe", request=A16_EXPERTS),
         "read without order after a write in another block"),
        (NEWEST, f"{FUSED}/_moe_dynamic/gated.py", "# The route caches lie in sA, which TMA",
         'cute.arch.fence_proxy("async.shared", space="cta")', PREFILL,
         "asynchronous write after a write without fence.proxy.async"),
    ],
    ids=["the next batch", "a block without work", "the grid of the W4A16 experts", "prefill"],
)  # fmt: skip
def test_each_barrier_and_fence_of_the_layer_is_needed(
    release: str,
    path: str,
    before: str,
    missing: str,
    kernel: Launched,
    race: str,
    planned: Planner,
) -> None:
    """A kernel without one of the layer's statements: a race, and no other fault."""
    made = planned(release)
    tree = OverlayTree(made.base.tree)
    tree.update(made.plan.changes)
    text = (tree.read(path) or b"").decode()
    assert text.count(before) == 1
    start = text.index("\n", text.index(before))
    end = text.index(missing, start) + len(missing)
    assert text[start:end].strip() == missing
    tree.update({path: Content.of((text[:start] + text[end:]).encode())})
    request = launch_request(made.plan.env, "sm_121a", [kernel])
    packages, trust = made.base.identity.packages, TrustedSources(everything=True)
    (reply,) = launch_in_sandbox(request, tree, packages, trust).replies
    runs = [run for ran in reply.ran for run in ran.runs]
    assert {(run.fault, run.wrong) for run in runs} == {("", 0)}
    assert race in {one.kind for run in runs for one in judged(run)}


(ONE_TOKEN,) = (one for one in LAUNCHED if one.name == "b12x MoE, 1 token")
(TOKENS_64,) = (one for one in LAUNCHED if one.name == "b12x MoE, 64 tokens")
(ONE_NARROW,) = (one for one in LAUNCHED if one.name == "b12x MoE, 1 token, narrow experts")
GATED, GENERIC, MICRO, STATIC, DIRECT = (
    f"{FUSED}/{name}.py"
    for name in (
        "_moe_dynamic/gated",
        "_moe_dynamic/generic",
        "moe_micro_kernel",
        "moe_static_kernel",
        "moe_direct_micro_kernel",
    )
)
FULL_TILE = "        phase2_pipeline.consumer_wait(phase2_cons_state, phase2_peek)\n"


@pytest.mark.parametrize(
    ("path", "before", "after", "kernel", "only"),
    [
        (GATED, "down_alpha[task_expert_idx]", "down_alpha[0]", PREFILL, None),
        (GATED, "global_scale[task_expert_idx]", "global_scale[0]", PREFILL, None),
        (GATED, FULL_TILE, "", PREFILL, 0),
        (GENERIC, "alpha[task_expert_idx]", "alpha[0]", MANY_TOKENS, None),
        (GENERIC, "token_weights[global_row_cache]", "token_weights[0]", MANY_TOKENS, None),
        (MICRO, "down_alpha[weight_expert_idx]", "down_alpha[0]", ONE_TOKEN, None),
        (STATIC, "input_global_scale[expert_id]", "input_global_scale[0]", TOKENS_64, None),
        (DIRECT, "w2_alphas[eid]", "w2_alphas[0]", ONE_NARROW, None),
    ],
    ids=[
        "prefill: the scale of the second product",
        "prefill: the scale between",
        "prefill: a wait of a full tile",
        "many tokens: both scales of products",
        "many tokens: the weight of a route",
        "1 token: the scale of the second product",
        "64 tokens: the scale of the activations",
        "narrow: the scale of the second product",
    ],
)
def test_a_kernel_that_takes_anothers_scale_or_does_not_wait_is_detected(
    path: str, before: str, after: str, kernel: Launched, only: int | None, planned: Planner
) -> None:
    """FlashInfer 0.7.2.post1, with a change of a kernel's source: each expert has other scales."""
    made = planned(NEWEST)
    tree = OverlayTree(made.base.tree)
    tree.update(made.plan.changes)
    parts = (tree.read(path) or b"").decode().split(before)
    assert len(parts) > 1
    at = range(1, len(parts)) if only is None else (only + 1,)
    changed = "".join(
        (after if n in at else before if n else "") + part for n, part in enumerate(parts)
    )
    tree.update({path: Content.of(changed.encode())})
    request = launch_request(made.plan.env, "sm_121a", [kernel])
    packages, trust = made.base.identity.packages, TrustedSources(everything=True)
    (reply,) = launch_in_sandbox(request, tree, packages, trust).replies
    assert not reply.error
    runs = [run for ran in reply.ran for run in ran.runs]
    races = [race for run in runs for race in judged(run) if race.kind != UNWRITTEN]
    assert races or any(run.fault or run.wrong for run in runs)


KERNELS = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
UTILS = "vllm/model_executor/layers/quantization/utils/nvfp4_utils.py"
SWIZZLED = "    swizzled = padded.permute(0, 1, 4, 3, 2, 5).contiguous().cuda()\n"
EXCHANGED = """\
    flat = swizzled.view(torch.uint8).view(-1)
    flat[:2] = flat[:2].flip(0)
"""
#: As the profile's flags name them.
BACKENDS = {"linear_backend": "auto", "moe_backend": "flashinfer_b12x"}
B12X = "class FlashInferB12xNvFp4LinearKernel"


FP4_MOE = "vllm/model_executor/layers/quantization/utils/flashinfer_fp4_moe.py"
EXPERTS = "vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py"
REORDERED = "        w13, w13_scale = reorder_w1w3_to_w3w1(w13, w13_scale)\n"
SWIZZLE = "        {0} = swizzle_blockscale({0})\n"
FOLDED = "layer.w13_weight_scale.float() * layer.w13_weight_scale_2.view(-1, 1, 1)"
#: Where the code begins that serves this kernel, in files that serve others too.
BEGIN = {KERNELS: B12X, FP4_MOE: "def prepare_nvfp4_moe_layer_for_fi_or_cutlass"}


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (UTILS, SWIZZLED, "    swizzled = padded\n"),
        (UTILS, SWIZZLED, f"{SWIZZLED}{EXCHANGED}"),
        (KERNELS, "            layer.alpha,\n", "            layer.weight_global_scale,\n"),
        (FP4_MOE, SWIZZLE.format("w13_scale"), ""),
        (FP4_MOE, SWIZZLE.format("w2_scale"), ""),
        (FP4_MOE, REORDERED, "        pass\n"),
        (EXPERTS, FOLDED, "layer.w13_weight_scale.float()"),
        (EXPERTS, "w2_alpha=self.g2_alphas", "w2_alpha=torch.ones_like(self.g2_alphas)"),
    ],
    ids=[
        "no swizzle",
        "two scales exchanged",
        "the activations' scale forgotten",
        "experts: no swizzle of w13",
        "experts: no swizzle of w2",
        "experts: w1 and w3 exchanged",
        "experts: scale for all of w13 forgotten",
        "experts: scale for all of w2 forgotten",
    ],
)
def test_a_layer_that_passes_wrong_values_is_detected(
    planned: Planner, path: str, before: str, after: str
) -> None:
    """A change of vLLM's own code; the kernel is the same."""
    made = planned("pypi:vllm==0.20.1")
    tree = OverlayTree(made.base.tree)
    tree.update(made.plan.changes)
    text = (tree.read(path) or b"").decode()
    begin = text.find(BEGIN.get(path, ""))
    assert text.count(before, begin) == 1
    changed = text[:begin] + text[begin:].replace(before, after)
    tree.update({path: Content.of(changed.encode())})
    name = EXPERTS_LAYER if path in (FP4_MOE, EXPERTS) else LAYER
    (layer,) = (one for one in LAUNCHED if one.name == name)
    request = launch_request(made.plan.env, "sm_121a", [layer], BACKENDS)
    packages, trust = made.base.identity.packages, TrustedSources(everything=True)
    (reply,) = launch_in_sandbox(request, tree, packages, trust).replies
    runs = [run for ran in reply.ran for run in ran.runs]
    assert {run.fault for run in runs} == {""}
    wrong = {run.schedule for run in runs if run.wrong}
    assert wrong == {"eager", "lazy", "random 1"}, "in one input at least"
