"""Layer ``vllm-b12x-padding``: FlashInfer's b12x experts, and tokens whose expert is -1."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import Content, OverlayTree
from builder.proof.kernels import LAUNCHED, MOE_LAYER, launch_in_sandbox, launch_request
from builder.proof.trust import TrustedSources

if TYPE_CHECKING:
    from builder.ptx.findings import Run
    from tests.wheels.support import Planned, Planner

LAYER = "vllm-b12x-padding"
EXPERTS = "vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py"
BACKENDS = {"linear_backend": "auto", "moe_backend": "flashinfer_b12x"}
(NVFP4,) = (
    one for one in LAUNCHED if one.serves == "nvfp4-moe" and one.request["kind"] == MOE_LAYER
)
TOKENS, HIDDEN = 24, 256
#: What vLLM's top-k kernels do with ``is_padding``: the last token is padding.
START = "        assert self.w1_scale is not None and self.w2_scale is not None, (\n"
PADDED = "        topk_ids = topk_ids.clone()\n        topk_ids[-1] = -1\n"


def runs_of(made: Planned, *, layer: bool, padded: bool) -> list[Run]:
    """vLLM's own experts with the profile's layers, with this one or without it."""
    tree = OverlayTree(made.base.tree)
    for decision in made.plan.decisions:
        if decision.name != LAYER or layer:
            tree.update(decision.outcome.changes)
    if padded:
        text = (tree.read(EXPERTS) or b"").decode()
        assert text.count(START) == 1
        tree.update({EXPERTS: Content.of(text.replace(START, PADDED + START).encode())})
    kernel = replace(NVFP4, request={**NVFP4.request, "tokens": [TOKENS]})
    request = launch_request(made.plan.env, "sm_121a", [kernel], BACKENDS)
    packages, trust = made.base.identity.packages, TrustedSources(everything=True)
    (reply,) = launch_in_sandbox(request, tree, packages, trust).replies
    assert not reply.error
    return [run for ran in reply.ran for run in ran.runs]


def differs_in_one_row(run: Run) -> bool:
    """A few of its values are right by chance: zero, or nearly."""
    return HIDDEN - 8 < run.wrong <= HIDDEN


@pytest.mark.parametrize("release", ["0.28.0", "0.30.0"])
def test_a_padding_token_needs_the_layer(release: str, planned: Planner) -> None:
    """Without it -1 is an index; with it the token's own row differs, and no other."""
    made = planned(f"pypi:vllm=={release}")
    assert made.decision(LAYER).outcome.state == "needed"
    for run in runs_of(made, layer=False, padded=True):
        assert "(4 bytes) is outside every buffer" in run.fault
    for run in runs_of(made, layer=True, padded=True):
        assert (run.fault, run.values) == ("", TOKENS * HIDDEN)
        assert differs_in_one_row(run)
    for run in runs_of(made, layer=True, padded=False):
        assert (run.fault, run.values, run.wrong) == ("", TOKENS * HIDDEN, 0)


def test_newer_kernels_skip_a_padding_token(planned: Planner) -> None:
    """FlashInfer 0.7.2.post1."""
    made = planned("pypi:vllm==0.33.0")
    assert made.decision(LAYER).outcome.state == "upstream"
    runs = [run for run in runs_of(made, layer=True, padded=True) if run.values]
    assert {run.fault for run in runs} == {""}
    assert runs
    assert all(map(differs_in_one_row, runs))
