"""Inputs for the kernels of level ``numbers``, and vLLM's calls with them.

Runs under the target's interpreter next to ``launch_probe.py``; the inputs and valid results
are those of level ``device`` (``device_cases``).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import TYPE_CHECKING, Any

from builder.probes import device_cases, host_triton
from builder.probes import nvfp4_reference as reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch: Any = importlib.import_module("torch")

#: Rows and columns of scales that the layout of cuBLAS keeps together ("128x4").
ROWS, COLUMNS = 128, 4


@dataclasses.dataclass
class Case:
    """One call, with its inputs and the valid results."""

    name: str
    call: Callable[[], Any] | None
    #: tensors that the kernel may only read
    inputs: list[Any]
    output: Any
    exact: Any
    bound: Any


class ExactCases(device_cases.LinearCases):
    """Linear cases for the executor, which sums as float32 does; tensor cores may keep fewer bits.

    With tensor cores' bound, a value could be off by more than its own size from a depth of 512 on.
    The activations' scales differ along the depth too, to detect swapped scales of neighbouring
    blocks.
    """

    blocks = (1.0, 2.0)

    def case(self, name: str, left: Any, weight: Any) -> Any:
        """Make the case for two operands."""
        case = super().case(name, left, weight)
        quanta = left.quanta()[:, None] * weight.quanta()[None, :]
        dense = left.dense(), weight.dense()
        case.expected = reference.expect(*dense, products="bf16", quanta=quanta)
        return case


def swizzled(scales: Any) -> Any:
    """E4M3 scales [rows, columns] as bytes in the layout of cuBLAS, padded with zeros.

    In tiles of 128x4, the bytes of row 32*a+b and column c lie at 16*b + 4*a + c.
    """
    rows, columns = scales.shape
    whole = torch.zeros(
        -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS, dtype=torch.uint8
    )
    whole[:rows, :columns] = scales.contiguous().view(torch.uint8)
    tiles = whole.reshape(whole.shape[0] // ROWS, 4, 32, whole.shape[1] // COLUMNS, COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().reshape(whole.shape)


def dense_cases(ask: dict[str, Any]) -> Iterator[Case]:
    """Calls of FlashInfer's b12x GEMM, one for each requested shape and kind of input."""
    for m, n, k in ask["shapes"]:
        draw = ExactCases("fp4", seed=int(ask.get("seed", 0)))
        for case in linear(draw, ask.get("inputs", "random"), m, n, k):
            yield _dense(ask, case)


def linear(draw: Any, inputs: str, m: int, n: int, k: int) -> Iterator[Any]:
    """The cases of one shape."""
    if inputs == "degenerate":
        yield draw.any_scales(m, n, k)
        yield draw.single(m, n, k)
        yield from draw.degenerate(m, n, k)
    else:
        yield draw.ordinary(m, n, k)


def _dense(ask: dict[str, Any], case: Any) -> Case:
    left, right = reference.quantise(case.x, case.input_scale), case.weight
    a, b = reference.pack(left.codes).contiguous(), reference.pack(right.codes).contiguous()
    a_scales, b_scales = swizzled(left.scales), swizzled(right.scales)
    alpha = torch.tensor([left.factor * right.factor], dtype=torch.float32)
    rows, columns = case.expected.exact.shape
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
    e4m3 = torch.float8_e4m3fn
    given = (a, b.T, a_scales.view(e4m3), b_scales.view(e4m3).T, alpha, torch.bfloat16, out, 16)

    def call() -> None:
        tile = ask.get("tile")
        if tile is None:
            importlib.import_module("flashinfer").mm_fp4(*given, False, backend="b12x")
            return
        gemm = importlib.import_module("flashinfer.gemm.gemm_base")
        runner = gemm._b12x_gemm_fp4_runner(12, 1, False, torch.bfloat16, True)
        tactic = (tuple(tile), (1, 1), bool(ask.get("swap_ab")), False, "sm120", None)
        runner.forward([*given, False, None], tactic=tactic)

    name = f"{case.name}, {case.shape}"
    inputs = [a, b, a_scales, b_scales, alpha]
    return Case(name, call, inputs, out, case.expected.exact, case.expected.bound)


def a16_cases(ask: dict[str, Any]) -> Iterator[Case]:
    """Calls of FlashInfer's GEMM of bfloat16 activations and FP4 weights, as vLLM makes them.

    Raises:
        AbsentError: the release has none.
    """
    gemm: Any = importlib.import_module("flashinfer.gemm")
    if not hasattr(gemm, "mm_bf16_fp4"):
        raise AbsentError("this FlashInfer has no GEMM of bfloat16 and FP4")
    for m, n, k in ask["shapes"]:
        draw = device_cases.LinearCases("bf16", seed=int(ask.get("seed", 0)))
        for case in linear(draw, ask.get("inputs", "random"), m, n, k):
            yield _a16(gemm, case)


def _a16(gemm: Any, case: Any) -> Case:
    weight, exact = case.weight, case.expected.exact
    packed = reference.pack(weight.codes).contiguous()
    scales = swizzled(weight.scales).view(torch.float8_e4m3fn)
    alpha = torch.tensor([weight.factor], dtype=torch.float32)
    given = (case.x, *gemm.prepare_bf16_fp4_weights(packed, scales, alpha, backend="cute-dsl"))
    out = torch.full(exact.shape, float("nan"), dtype=torch.bfloat16)

    def call() -> None:
        gemm.mm_bf16_fp4(*given, backend="cute-dsl", out=out)

    name = f"{case.name}, {case.shape}"
    return Case(name, call, list(given), out, exact, case.expected.bound)


def moe_cases(ask: dict[str, Any]) -> Iterator[Case]:
    """Calls of FlashInfer's fused b12x experts.

    The second product is split into slices of 128 along its length, each of which is added by a
    bfloat16 atomic: with an intermediate size of 128 there is one, as the bound supposes.
    """
    if ask.get("many"):
        as_for_many_tokens()
    if ask.get("prefill"):
        look_for_prefill()
    if ask.get("narrow"):
        as_for_narrow_experts()
    else:
        as_for_wide_experts()
    count, top_k = int(ask.get("experts", 8)), int(ask.get("top_k", 2))
    hidden, inner = int(ask.get("hidden", 512)), int(ask.get("intermediate", 128))
    mode = "w4a16" if a16_is_forced() else ask.get("mode", "")
    experts = device_cases.dense_experts(count, hidden, inner, finer=bool(mode))
    if mode:
        as_for_a16_experts()
    for number in ask["tokens"]:
        drawn = device_cases.dense_tokens(number, count, top_k, hidden, finer=bool(mode))
        tokens = device_cases.with_unequal_shares(drawn)
        for one in device_cases.batches(tokens, degenerate=ask.get("inputs") == "degenerate"):
            ones = bool(ask.get("narrow")) and multiplies()
            yield _moe(experts, one, count, top_k, mode, ones=ones)


#: FlashInfer's kernels of experts for SM12x, and the module that selects one.
PACKAGE = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x"
DISPATCH = f"{PACKAGE}.moe_dispatch"


class AbsentError(Exception):
    """The release has no such kernel."""

    stage = "absent"


def as_for_narrow_experts() -> None:
    """Make few tokens use FlashInfer's kernel for experts at most 512 wide.

    Raises:
        AbsentError: this FlashInfer has only one such kernel.
    """
    dispatch: Any = importlib.import_module(DISPATCH)
    if not hasattr(dispatch, "compiled_direct_micro_accepts_block_dim"):
        raise AbsentError("this FlashInfer has no experts' kernel without tensor cores")
    dispatch.compiled_direct_micro_accepts_block_dim = accepts_block


def accepts_block(compiled: Any, threads: int) -> bool:
    """Whether a kernel can have as many threads as it wants, which CUDA's driver is asked.

    It can, where the PTX requires them ("Performance-Tuning Directives: .reqntid").
    """
    return any(f".reqntid {threads}, 1, 1" in text for text in compiled.ptx)


def as_for_wide_experts() -> None:
    """Make few tokens use tensor cores, as for experts wider than 512 (from 0.6.18 on)."""
    dispatch: Any = importlib.import_module(DISPATCH)
    dispatch._DIRECT_MICRO_CUTOVER_PAIRS = 0


def look_for_prefill() -> None:
    """Look whether FlashInfer has a kernel of its own for 96 and more rows of an expert.

    Raises:
        AbsentError: it has the one for many tokens for that, too.
    """
    try:
        importlib.import_module(f"{PACKAGE}._moe_dynamic.gated")
    except ModuleNotFoundError:
        message = "this FlashInfer has no experts' kernel of its own for prefill"
        raise AbsentError(message) from None


def as_for_many_tokens() -> None:
    """Make FlashInfer use its kernel for many tokens, for any number of tokens.

    It chooses by a number of pairs of token and expert: a constant in 0.6.9, later a variable too.
    """
    os.environ["FLASHINFER_B12X_STATIC_COMPACT_CUTOVER_PAIRS"] = "0"
    dispatch: Any = importlib.import_module(DISPATCH)
    dispatch._STATIC_COMPACT_CUTOVER_PAIRS = 0


def a16_is_forced() -> bool:
    """Whether FlashInfer is configured to keep the activations of all experts in bfloat16."""
    return os.environ.get("FLASHINFER_B12X_FORCE_MOE_W4A16") == "1"


class OnCuda(torch.Tensor):  # type: ignore[misc]
    """A tensor that reports to be on the device."""

    is_cuda = True


def as_for_a16_experts() -> None:
    """Prepare for experts of bfloat16 activations and FP4 weights.

    Their host code reads the number of SMs from torch, which has no device here; it
    sorts the routes of more than a few tokens in Triton.

    Raises:
        AbsentError: this FlashInfer has no such experts that sort routes in Triton.
    """
    torch.cuda.is_available = lambda: True
    try:
        packing = importlib.import_module(f"{DISPATCH.rpartition('.')[0]}.moe_w4a16_route_pack")
    except ModuleNotFoundError:
        raise AbsentError("this FlashInfer has no W4A16 kernel for sorted experts") from None
    host_triton.run_on_host(packing)


def exactly(experts: Any, tokens: Any) -> Any:
    """The valid results of experts in the executor, whose products are exact.

    Each share is rounded to bfloat16 once.  The first is added to zero, which rounds nothing, and
    each of the others is rounded with what is there: as many roundings as shares, of at most the
    sum of their magnitudes.  A kernel may round a product before it multiplies it by the weight of
    the route; that is no rounding more only if the weight is a power of two.
    """
    powers = bool((torch.frexp(tokens.weights())[0] == 0.5).all())
    roundings = tokens.chosen.shape[1] + (0 if powers else 1)
    return device_cases.expect(experts, tokens, "bf16", roundings=roundings)


@dataclasses.dataclass
class Scales:
    """Global scales of experts, another power of two for each, and block scales that go with them.

    Exact: no block scale leaves the normal numbers of E4M3.  Up to 8 experts.
    """

    #: of the first product; a kernel that quantises also divides the activations by it
    w1_alpha: Any
    #: what the values between are divided by before they are quantised
    fc2_input: Any
    #: of the second product
    w2_alpha: Any
    gate_up: Any
    down: Any


def multiplies() -> bool:
    """Whether the kernel for narrow experts multiplies by the scales that the others divide by.

    FlashInfer 0.6.18 calls all of them with the same; vLLM gives it 1, with which both are right.
    """
    try:
        narrow: Any = importlib.import_module(f"{PACKAGE}.moe_direct_micro_kernel")
    except ModuleNotFoundError:
        return False
    return not hasattr(narrow.MoEDirectMicroKernel, "_multiplier_scale")


def scales_apart(experts: Any, mode: str, *, ones: bool = False) -> Scales:
    """The same experts, with a global scale of its own for each in each place.

    Of the second product it is not in proportion to what the values between were divided by: a
    kernel that takes both of another expert is wrong too.  ``ones``: activations have 1, as from
    vLLM.
    """
    number = torch.arange(len(experts.down.codes))
    # without quantising, block scales go with the first, and leave less room below
    first = 2.0 ** (2 - number if mode else number - 2)
    between, down = 2.0**number, 2.0 ** (number - 5)
    if ones:
        first = between = torch.ones(len(number))

    def over(scales: Any, factors: Any) -> Any:
        return (scales.float() / factors[:, None, None]).to(scales.dtype)

    gate_up, alpha = experts.gate_up.scales, float(experts.down.factor) * down
    if mode:  # nothing is quantised between
        gate_up = over(gate_up, first)
    else:
        alpha = alpha * between
    return Scales(first, between, alpha, gate_up, over(experts.down.scales, down))


def _moe(
    experts: Any, tokens: Any, count: int, top_k: int, mode: str = "", *, ones: bool = False
) -> Case:
    to_mma = importlib.import_module("flashinfer.cute_dsl.utils").convert_sf_to_mma_layout
    inner = experts.down.codes.shape[2]

    def halves_swapped(values: Any) -> Any:
        """Swap the halves: b12x needs up first, then gate."""
        raw = values.view(torch.uint8)
        return torch.cat([raw[:, inner:], raw[:, :inner]], dim=1)

    def weight(codes: Any, scales: Any) -> tuple[Any, Any, Any]:
        packed = reference.pack(codes).contiguous()
        rows, columns = codes.shape[1:]
        flat = torch.cat([swizzled(scales[e]) for e in range(count)])
        laid = to_mma(flat.view(torch.float8_e4m3fn), m=rows, k=columns, num_groups=count)
        return packed, laid, flat

    scales = scales_apart(experts, mode, ones=ones)
    up = weight(halves_swapped(experts.gate_up.codes), halves_swapped(scales.gate_up))
    down = weight(experts.down.codes, scales.down.view(torch.uint8))
    x = tokens.x.to(torch.bfloat16)
    chosen = tokens.chosen.to(torch.int32).contiguous().as_subclass(OnCuda)
    weights = tokens.weights().float()
    out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
    expected = exactly(experts, tokens)

    def call() -> None:
        importlib.import_module("flashinfer").b12x_fused_moe(
            x=x,
            token_selected_experts=chosen,
            token_final_scales=weights,
            w1_weight=up[0],
            w1_weight_sf=up[1],
            w1_alpha=scales.w1_alpha,
            fc2_input_scale=scales.fc2_input,
            w2_weight=down[0],
            w2_weight_sf=down[1],
            w2_alpha=scales.w2_alpha,
            num_experts=count,
            top_k=top_k,
            num_local_experts=count,
            output_dtype=torch.bfloat16,
            output=out,
            **({"quant_mode": mode} if mode else {}),
        )

    apart = (scales.w1_alpha, scales.fc2_input, scales.w2_alpha)
    inputs = [x, chosen, weights, up[0], down[0], up[2], down[2], *apart]
    name = f"{tokens.name}, {len(x)} tokens, {count} experts, {x.shape[1]}x{inner}"
    return Case(name, call, inputs, out, expected.exact, expected.bound)


KINDS = {"dense-b12x": dense_cases, "dense-w4a16": a16_cases, "moe-b12x": moe_cases}
