"""Layer ``vllm-b12x-experts-scales``: kernels get experts' scales as a checkpoint has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from builder.layers.catalog import Catalog
from builder.proof.kernels import LAUNCHED, MOE_LAYER, launch_request
from builder.proof.numbers import UNWRITTEN, judged
from builder.proof.opening import target_of_plan
from tests.wheels.support import replies_of

if TYPE_CHECKING:
    from builder.proof.kernels import Reply
    from tests.wheels.support import Planner

BACKENDS = {"linear_backend": "auto", "moe_backend": "flashinfer_b12x"}
FORCED = {"FLASHINFER_B12X_FORCE_MOE_W4A16": "1"}
SCALES = "vllm-b12x-experts-scales"
EXPERTS = "vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py"
#: The layers of the profile but this one.
WITHOUT = ",".join(
    name for name in Catalog.discover().profile("b12x-full").layers if name != SCALES
)
#: FlashInfer 0.6.9, 0.6.16.post3 and 0.7.2.post1.
OLD, BEFORE, NEW = "0.20.1", "0.28.0", "0.33.0"
(NVFP4,) = (
    one for one in LAUNCHED if one.serves == "nvfp4-moe" and one.request["kind"] == MOE_LAYER
)
(A16,) = (one for one in LAUNCHED if one.serves == "w4a16-moe")
#: What is small, and how many of 256 values are wrong: with vLLM's own code, ...
DEFECT = {"nothing": 0, "down": 165, "up": 256}
#: ... with the layer, and with the layer before FlashInfer 0.6.18.
CURED = dict.fromkeys(DEFECT, 0)
DOWN_CURED = {**CURED, "up": 256}


def assert_right(reply: Reply, values: int) -> None:
    """Of one or several launches, the last of which gives the values."""
    assert not reply.error
    assert {(run.wrong, run.fault) for ran in reply.ran for run in ran.runs} == {(0, "")}
    assert [run.values for run in reply.ran[-1].runs] == [values] * 3


@pytest.mark.parametrize(
    ("release", "layers", "wrong"),
    [
        (f"{OLD},nvidia-cutlass-dsl==4.4.2", WITHOUT, DEFECT),  # as the profile pins it
        (OLD, "b12x-full", DOWN_CURED),
        (BEFORE, "b12x-full", DOWN_CURED),
        (NEW, WITHOUT, DEFECT),
        (NEW, "b12x-full", CURED),
    ],
)
def test_small_scales(release: str, layers: str, wrong: dict[str, int], planned: Planner) -> None:
    """Level ``numbers``' means, on vLLM's own experts: docs/kernel-defects.md."""
    made = planned(f"pypi:vllm=={release}", layers)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    wanted = [replace(NVFP4, request={**NVFP4.request, "small": small}) for small in wrong]
    replies = replies_of(target, launch_request(made.plan.env, "sm_121a", wanted, BACKENDS)).replies
    for reply, (small, count) in zip(replies, wrong.items(), strict=True):
        assert not reply.error
        (ran,) = reply.ran
        seen = [(run.values, run.wrong, run.fault) for run in ran.runs]
        assert seen == [(256, count, "")] * 3, small
        assert not any(race.kind != UNWRITTEN for run in ran.runs for race in judged(run))


@pytest.mark.parametrize(("tokens", "more"), [([24], {}), ([1], FORCED)])
def test_small_scales_in_other_kernels(
    tokens: list[int], more: dict[str, str], planned: Planner
) -> None:
    """More tokens have a kernel of their own, and so have activations of bfloat16."""
    made = planned(f"pypi:vllm=={NEW}")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    asked = {**NVFP4.request, "tokens": tokens}
    wanted = [replace(NVFP4, request={**asked, "small": small}) for small in ("down", "up")]
    request = launch_request({**made.plan.env, **more}, "sm_121a", wanted, BACKENDS)
    for reply in replies_of(target, request).replies:
        assert_right(reply, 256 * tokens[0])


@pytest.mark.parametrize("release", [BEFORE, NEW])
def test_w4a16_experts_stay_right(release: str, planned: Planner) -> None:
    """The same class serves them, without scales of a checkpoint for the activations."""
    made = planned(f"pypi:vllm=={release}")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    # FlashInfer's own kernels for them take the factors, too
    for more in ({}, FORCED):
        request = launch_request({**made.plan.env, **more}, "sm_121a", [A16], BACKENDS)
        (reply,) = replies_of(target, request).replies
        assert_right(reply, 256)


@pytest.mark.parametrize("release", [OLD, "0.23.0", BEFORE, "0.29.0", NEW])
def test_what_stays_of_the_products(release: str, planned: Planner) -> None:
    """For gate and up where FlashInfer takes no scale of the activations, else none."""
    made = planned(f"pypi:vllm=={release}")
    content = made.decision(SCALES).outcome.changes[EXPERTS]
    assert content is not None
    text = content.read().decode()
    late = release >= "0.29.0"
    assert "w2_weight_scale_2.view(" not in text
    assert "w2_weight_scale_2.data" not in text
    assert ("w13_weight_scale_2.view(" in text) is not late
    assert ("input_global_scale=" in text) is late
    called = made.base.tree.read("flashinfer/fused_moe/cute_dsl/b12x_moe.py") or b""
    assert (b"input_global_scale" in called) is late


def test_it_says_what_is_missing_before_0_22_0(planned: Planner) -> None:
    """vLLM's file comes from another layer there."""
    made = planned(f"pypi:vllm=={OLD}", SCALES)
    (decision,) = made.plan.decisions
    assert (decision.outcome.state, decision.outcome.changes) == ("drift", {})
    assert f"{EXPERTS} does not exist" in decision.outcome.reason
