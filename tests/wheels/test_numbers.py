"""Level ``numbers`` on released wheels: what is right, and the defects that it finds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import Content, OverlayTree
from builder.verify.launches import LAUNCHED, launch_request, sandbox_launcher
from builder.verify.numbers import check_numbers
from builder.verify.targets import target_of_plan
from builder.verify.trust import TrustedSources

if TYPE_CHECKING:
    from .support import Planner

LAYER = "vLLM's NVFP4 linear layer"
RIGHT = {
    LAYER,
    *(f"b12x GEMM, tile {tile}" for tile in ("128x128", "64x128", "128x64", "64x64")),
    "b12x GEMM, 1 token",
    "b12x GEMM, special values",
}
SEVERAL = "b12x GEMM, several tiles a block"
MOE = {"b12x MoE, 1 token", "b12x MoE, 24 tokens", "b12x MoE, many tokens"}


def test_what_b12x_full_computes_on_0_20_1(planned: Planner) -> None:
    made = planned("pypi:vllm==0.20.1")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    checks = {check.name: check for check in check_numbers(target)}
    assert set(checks) == {*RIGHT, SEVERAL, *MOE}
    for name in RIGHT:
        check = checks[name]
        assert check.status == "pass", check.seen
        words = r"[1-9]\d+ values right, in \d+ launches and 3 schedules each; no race"
        assert re.match(words, check.seen)
        assert any("its functions record launches" in words for words in check.simulated)
        operators = [words for words in check.simulated if words.startswith("torch.ops._C.scaled")]
        assert operators == ["torch.ops._C.scaled_fp4_quant.out: a reference, on the CPU"]
    for name in RIGHT - {"b12x GEMM, special values", LAYER}:
        ran, blocks = map(int, re.findall(r"(\d+) of (\d+) basic blocks", checks[name].seen)[0])
        assert ran >= 0.97 * blocks, "the shapes reach nearly all of the kernel"
    # nobody waits for the store of one tile before the next is written over it: by luck right
    # where stores happen at once
    several = checks[SEVERAL]
    assert several.status == "fail"
    assert "(lazy, random 1)" in several.seen
    dense = r"flashinfer/gemm/kernels/dense_blockscaled_gemm_sm120\.py:1{}"
    stores = f"line [0-9]+ .warp [0-9], {dense.format(123)}. and "
    stores += f"line [0-9]+ .asynchronous copy, {dense.format(137)}."
    assert re.search(f"race, write while a copy may still read: {stores}", several.seen)
    # a barrier is missing before the scatter
    files = {
        "b12x MoE, 1 token": "moe_micro_kernel",
        "b12x MoE, 24 tokens": "moe_static_kernel",
        "b12x MoE, many tokens": "moe_dynamic_kernel",
    }
    assert set(files) == MOE
    for name, file in files.items():
        assert checks[name].status == "fail"
        assert "wrong values in 3 runs of 3" in checks[name].seen
        by = rf"line \d+ \(warp \d, flashinfer/fused_moe/[a-z0-9_/]+/{file}\.py:\d+\)"
        found = rf"race, read without order after a write: {by} and {by}"
        assert re.search(found, checks[name].seen)


KERNELS = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
UTILS = "vllm/model_executor/layers/quantization/utils/nvfp4_utils.py"
SWIZZLED = "    swizzled = padded.permute(0, 1, 4, 3, 2, 5).contiguous().cuda()\n"
EXCHANGED = """\
    flat = swizzled.view(torch.uint8).view(-1)
    flat[:2] = flat[:2].flip(0)
"""
B12X = "class FlashInferB12xNvFp4LinearKernel"


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (UTILS, SWIZZLED, "    swizzled = padded\n"),
        (UTILS, SWIZZLED, f"{SWIZZLED}{EXCHANGED}"),
        (KERNELS, "            layer.alpha,\n", "            layer.weight_global_scale,\n"),
    ],
    ids=["no swizzle", "two scales exchanged", "the activations' scale forgotten"],
)
def test_a_layer_that_hands_over_something_else_is_seen(
    planned: Planner, path: str, before: str, after: str
) -> None:
    """A change of vLLM's own code; the kernel is the same."""
    made = planned("pypi:vllm==0.20.1")
    tree = OverlayTree(made.base.tree)
    tree.update(made.plan.changes)
    text = (tree.read(path) or b"").decode()
    begin = text.find(B12X) if path == KERNELS else 0
    assert text.count(before, begin) == 1
    changed = text[:begin] + text[begin:].replace(before, after)
    tree.update({path: Content.of(changed.encode())})
    (layer,) = (one for one in LAUNCHED if one.name == LAYER)
    launch = sandbox_launcher(tree, made.base.identity.packages, TrustedSources(everything=True))
    request = launch_request(made.plan.as_json()["env"], "sm_121a", [layer])
    (reply,) = launch(request).replies
    runs = [run for ran in reply.ran for run in ran.runs]
    assert [run.fault for run in runs] == [""] * 6
    wrong = {run.schedule for run in runs if run.wrong}
    assert wrong == {"eager", "lazy", "random 1"}, "in one input at least"
