"""The layer ``vllm-linear-fallback``: checkpoints that mix NVFP4 with FP8 and W4A16 layers.

vLLM's own selector is asked in the sandbox, as in ``test_dispatch``.  Each release here has a form
of the file of its own.  0.28.0 has the fall-back itself: the others are compared with it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.diagnose.verdict import diagnose
from builder.proof.checks import KINDS
from builder.proof.opening import target_of_plan
from builder.proof.recorded import Outcome, read_records, setting
from builder.proof.replies import Ask, DispatchReply, DispatchRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.probes.dispatch_expect import Answer

    from .support import Planner

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
RELEASES = ("0.24.0", "0.25.1", "0.26.0", "0.27.1")
UPSTREAM = "0.28.0"
B12X = "flashinfer_b12x"
LINEAR = tuple(kind for kind in KINDS if kind.endswith(("-linear", "-block")))
#: What b12x has no kernel for, and the kernel that each gets.
OTHERS = {
    "fp8-linear": "FlashInferFP8ScaledMMLinearKernel",
    "fp8-block": "DeepGemmFp8BlockScaledMMKernel",
    "w4a16-linear": "MarlinNvFp4LinearKernel",
}
REFUSED = (
    "--linear-backend=flashinfer_b12x was requested but no 'flashinfer_b12x' kernel exists for"
)


def ask(
    planned: Planner,
    release: str,
    request: DispatchRequest,
    layers: str = "b12x-full",
    *,
    patched: bool = True,
) -> DispatchReply:
    """What a release answers, with some layers on it."""
    made = planned(f"pypi:vllm=={release}", layers)
    target = target_of_plan(made.plan, made.base, release, patched=patched)
    reply = target.runner.dispatch(request)
    assert isinstance(reply, DispatchReply), str(reply)
    return reply


def by_kind(reply: DispatchReply) -> Mapping[str, Answer]:
    """The answers to one ask of each kind."""
    return {answer.kind: answer for answer in reply.answers}


FLAG = DispatchRequest(ask=tuple(Ask(kind=kind, linear_backend=B12X) for kind in LINEAR))


@pytest.mark.parametrize("release", [*RELEASES, UPSTREAM])
def test_layers_without_a_b12x_kernel_fall_back_and_vllm_says_so(
    planned: Planner, release: str
) -> None:
    answers = by_kind(ask(planned, release, FLAG))
    assert answers["nvfp4-linear"].selected == "FlashInferB12xNvFp4LinearKernel"
    assert {kind: answers[kind].selected for kind in OTHERS} == OTHERS
    for kind, answer in answers.items():
        log = "".join(f"WARNING 08-12 10:00:00 [__init__.py:9] {line}\n" for line in answer.lines)
        found = diagnose(io.BytesIO(log.encode()), release).findings
        fell = [one.id for one in found if one.id == "linear-backend-fell-back"]
        assert len(fell) == (kind in OTHERS), (kind, answer.lines)


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_layer_they_are_refused(planned: Planner, release: str) -> None:
    answers = by_kind(ask(planned, release, FLAG, "vllm-b12x-reachable"))
    assert answers["nvfp4-linear"].selected == "FlashInferB12xNvFp4LinearKernel"
    for kind in OTHERS:
        refused = answers[kind].error
        assert refused is not None
        assert REFUSED in refused.message


@pytest.mark.parametrize("release", RELEASES)
def test_w4a4_layers_never_fall_back_from_b12x(planned: Planner, release: str) -> None:
    """Without vllm-b12x-reachable their kernel is no candidate: vLLM stops, as if unpatched."""
    answers = by_kind(ask(planned, release, FLAG, "vllm-linear-fallback"))
    refused = answers["nvfp4-linear"].error
    assert refused is not None
    assert f"{REFUSED} NVFP4 layers" in refused.message
    assert {kind: answers[kind].selected for kind in OTHERS} == OTHERS


@pytest.mark.parametrize("release", ["0.27.1", UPSTREAM])
def test_a_b12x_kernel_that_cannot_run_is_no_reason_for_another(
    planned: Planner, release: str
) -> None:
    request = DispatchRequest(
        env={"VLLM_DISABLED_KERNELS": "FlashInferB12xNvFp4LinearKernel"},
        ask=(Ask(kind="nvfp4-linear", linear_backend=B12X),),
    )
    (answer,) = ask(planned, release, request).answers
    assert answer.error is not None
    assert "Failed to find a kernel that can implement the NVFP4" in answer.error.message
    assert "FlashInferB12xNvFp4LinearKernel disabled" in answer.error.message


#: What else changed in 0.28.0: b12x joined the list of the automatic choice, and PyTorch's kernel
#: for FP8 blocks that of the flag.
NOT_OURS = {
    ("nvfp4-linear", "VLLM_DISABLED_KERNELS=FlashInferCutlassNvFp4LinearKernel"),
    ("fp8-block", "--linear-backend torch"),
}


@pytest.mark.parametrize("release", RELEASES)
def test_every_value_of_the_flag_does_what_it_does_in_0_28(planned: Planner, release: str) -> None:
    (upstream,) = (one for one in read_records(EVIDENCE) if one.vllm == UPSTREAM)
    differ = set()
    asked = ask(planned, release, DispatchRequest(choices=LINEAR)).choices
    for answer in asked:
        now = Outcome.of(answer)
        key = (answer.kind, setting(answer.request))
        kept = upstream.choices[answer.kind].get(key[1])
        then = kept if isinstance(kept, Outcome) else Outcome(selected=kept or "")
        if (now.selected, bool(now.refused)) != (then.selected, bool(then.refused)):
            differ.add(key)
    assert len(asked) > 4 * 15
    assert differ == NOT_OURS
