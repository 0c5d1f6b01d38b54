"""Formats by enumeration, bounds by simulated kernels: right ones pass, wrong ones are caught."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import site
import struct
import sys
import types
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

from builder.proof.sandbox import Sandbox, requirements_for, torch_folder

from ..unit.inimage import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = [(1, 128, 128), (17, 96, 256), (40, 64, 512)]


@pytest.fixture(scope="module", autouse=True)
def _with_torch() -> Iterator[None]:
    """The sandbox's torch, behind everything else on the path."""
    sandbox = Sandbox(requirements_for("0.33.0"))
    sandbox.prepare()
    before = list(sys.path)
    site.addsitedir(str(next((sandbox.root / "lib").glob("python3*/site-packages"))))
    sys.path.append(str(torch_folder("2.11.0").folder))
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def torch(_with_torch: None) -> Any:
    """On one thread: for sums this small, others only wait, and take processor time for it."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="module")
def reference(torch: Any) -> Any:
    return load("nvfp4_reference")


@pytest.fixture(scope="module")
def cases(torch: Any) -> Any:
    return load("device_cases")


@pytest.fixture(scope="module")
def launch_cases(torch: Any) -> Any:
    return load("launch_cases")


# --------------------------------------------------------------------------------------- formats


def small_float(bits: int, exponent: int, mantissa: int, bias: int) -> Fraction:
    """The magnitude of a small float from its bits, as IEEE 754 forms it."""
    fraction = Fraction(bits & ((1 << mantissa) - 1), 1 << mantissa)
    power = bits >> mantissa & ((1 << exponent) - 1)
    if power == 0:
        return fraction * Fraction(2) ** (1 - bias)
    return (1 + fraction) * Fraction(2) ** (power - bias)


E2M1 = [small_float(bits, 2, 1, 1) for bits in range(8)]
#: Without 0x7F, which is NaN.
E4M3 = [small_float(bits, 4, 3, 7) for bits in range(127)]


def nearest(value: Fraction, values: list[Fraction]) -> int:
    """Index of the nearest, ties to the even one, by trying all."""
    return min(range(len(values)), key=lambda i: (abs(values[i] - value), i % 2))


def grid(values: list[Fraction]) -> list[Fraction]:
    """Each value, each middle between two, and just beside both."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    points = [*values, *middles]
    beside = [p + d for p in points for d in (Fraction(1, 1 << 20), -Fraction(1, 1 << 20))]
    return sorted({p for p in (*points, *beside) if 0 <= p <= values[-1]})


def test_e2m1_decodes_by_its_bits(reference: Any, torch: Any) -> None:
    decoded = reference.decode_e2m1(torch.arange(16))
    assert [Fraction(v) for v in decoded.tolist()] == [*E2M1, *(-v for v in E2M1)]
    assert math.copysign(1, decoded[8]) == -1, "-0.0 keeps its sign"


def test_e2m1_is_rounded_to_the_nearest(reference: Any, torch: Any) -> None:
    points = grid(E2M1)
    values = torch.tensor([float(p) for p in points], dtype=torch.float64)
    expected = [nearest(p, E2M1) for p in points]
    assert reference.encode_e2m1(values).tolist() == expected
    assert reference.encode_e2m1(-values).tolist() == [code + 8 for code in expected]


@pytest.mark.parametrize(("value", "code"), [(6.5, 7), (1e30, 7), (-1e30, 15), (-0.0, 8), (0.0, 0)])
def test_e2m1_beyond_its_range_and_at_zero(
    reference: Any, torch: Any, value: float, code: int
) -> None:
    assert reference.encode_e2m1(torch.tensor([value])).tolist() == [code]


def test_e4m3_is_rounded_to_the_nearest_and_saturates(reference: Any, torch: Any) -> None:
    narrow = {p: struct.unpack("f", struct.pack("f", float(p)))[0] for p in grid(E4M3)}
    points = [p for p, value in narrow.items() if p == value]
    assert len(points) > 500
    values = torch.tensor([float(p) for p in points])
    encoded = reference.encode_e4m3(values).view(torch.uint8).tolist()
    assert encoded == [nearest(p, E4M3) for p in points]
    large = reference.encode_e4m3(torch.tensor([449.0, 1e9, -1e9]))
    assert large.float().tolist() == [448.0, 448.0, -448.0]
    assert float(E4M3[1]) == reference.E4M3_TINY
    assert float(E4M3[-1]) == reference.E4M3_MAX


def test_packing(reference: Any, torch: Any) -> None:
    codes = torch.randint(16, (5, 32), dtype=torch.uint8)
    packed = reference.pack(codes)
    assert packed.shape == (5, 16)
    assert int(packed[0, 0]) == int(codes[0, 0]) + 16 * int(codes[0, 1]), (
        "the first is the low half"
    )
    assert torch.equal(reference.unpack(packed), codes)


def test_granules_by_experiment(reference: Any, torch: Any) -> None:
    values = torch.tensor([[0.75, -3.0, 0.0], [0.0, 0.0, 0.0], [448.0, 2.0**-9, 6.0]])
    assert reference.granules(values).tolist() == [0.25, 1.0, 2.0**-9]


def test_quantising_is_off_by_half_a_step_at_most(reference: Any, torch: Any) -> None:
    values = torch.randn(64, 256, dtype=torch.float64)
    made = reference.quantise(values, 1.0 / 64)
    steps = made.scales.double().repeat_interleave(16, -1) / 64
    size = made.dense().abs() / steps
    half = torch.where(size >= 4, 1.0, torch.where(size >= 2, 0.5, 0.25)) * steps
    beyond = values.abs() > 6 * steps  # the scale was rounded down
    assert bool((((made.dense() - values).abs() <= half * (1 + 1e-12)) | beyond).all())
    assert float(beyond.double().mean()) < 0.05


def test_zeros_stay_zero_and_finite(reference: Any, torch: Any) -> None:
    made = reference.quantise(torch.zeros(2, 32, dtype=torch.float64), 1.0)
    assert not bool(made.dense().any())
    vanishing = reference.quantise(torch.full((1, 16), 2.0**-40, dtype=torch.float64), 1.0)
    assert vanishing.dense().tolist() == [[0.0] * 16]


# ------------------------------------------------------------------------------- the linear cases


@pytest.fixture(scope="module")
def linear(cases: Any) -> list[Any]:
    return list(cases.LinearCases("fp4").all(SHAPES))


def test_quantised_activations_are_unchanged(linear: list[Any], reference: Any) -> None:
    """Else a right kernel would work on other operands than the reference."""
    for case in linear:
        if not case.name.startswith("vanishing"):
            again = reference.quantise(case.x, case.input_scale).dense()
            assert bool((again == case.x.double()).all()), case.name


def test_the_names_and_the_shapes(linear: list[Any]) -> None:
    assert len(linear) == 2 * len(SHAPES) + 1 + 9
    assert {case.shape for case in linear} >= {"1x128x128", "17x96x256", "40x64x512", "64x96x256"}


def right(case: Any) -> Any:
    """FP32 sums and one rounding: what a right kernel gives."""
    return case.x.float() @ case.weight.dense().float().T


def test_a_correct_kernel_passes(linear: list[Any], reference: Any, torch: Any) -> None:
    worst = 0.0
    for case in linear:
        verdict = reference.judge(right(case).to(torch.bfloat16), case.expected)
        assert verdict["problems"] == [], case.name
        worst = max(worst, verdict["worst"])
    assert worst > 0.9, "the bound is tight"


def summed(left: Any, weight: Any, bits: int, torch: Any) -> Any:
    """Products added one after the other, keeping ``bits`` fraction bits of the larger addend.

    By truncation, aligned: the model of a tensor core's sum.
    """
    total = torch.zeros(len(left), len(weight), dtype=torch.float64)
    for k in range(left.shape[1]):
        product = left[:, k, None] * weight[None, :, k]
        larger = torch.maximum(total.abs(), product.abs())
        unit = torch.pow(2.0, torch.floor(torch.log2(larger.clamp(min=1e-300))) - bits)
        total = torch.trunc(total / unit) * unit + torch.trunc(product / unit) * unit
    return total


@pytest.mark.parametrize(("bits", "passes"), [(23, True), (13, True), (8, False)])
def test_sums_of_few_bits(
    linear: list[Any], reference: Any, torch: Any, bits: int, passes: bool
) -> None:
    """13 fraction bits are within the bounds that were derived for them; 8 are not."""
    problems = []
    for case in linear:
        if case.name.startswith("vanishing"):
            continue
        total = summed(case.x.double(), case.weight.dense(), bits, torch)
        problems += reference.judge(total.to(torch.bfloat16), case.expected)["problems"]
    assert (problems == []) is passes, problems[:3]


def moved_scales(case: Any, torch: Any) -> Any:
    """Every block's scale read one block further."""
    scales = case.weight.scales.view(torch.uint8).roll(1, -1).view(torch.float8_e4m3fn)
    weight = type(case.weight)(case.weight.codes, scales, case.weight.factor)
    return case.x.float() @ weight.dense().float().T


def tiled_scales(case: Any, torch: Any) -> Any:
    """Scales read row by row out of tiles of 128 rows by 4 blocks."""
    rows, blocks = case.weight.scales.shape
    scales = case.weight.scales.float().reshape(rows // 32, 32, blocks // 4, 4)
    mixed = scales.permute(0, 2, 1, 3).reshape(rows, blocks).to(torch.float8_e4m3fn)
    weight = type(case.weight)(case.weight.codes, mixed, case.weight.factor)
    return case.x.float() @ weight.dense().float().T


def swapped_nibbles(case: Any, torch: Any) -> Any:
    """The high half of a byte taken for the first value."""
    codes = case.weight.codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    weight = type(case.weight)(codes, case.weight.scales, case.weight.factor)
    return case.x.float() @ weight.dense().float().T


def truncated(case: Any, torch: Any) -> Any:
    """The result cut to bfloat16 instead of rounded."""
    return (right(case).view(torch.int32) & -65536).view(torch.float32)


def last_block_lost(case: Any, torch: Any) -> Any:
    """The contraction ends a block early."""
    return case.x.float()[:, :-16] @ case.weight.dense().float()[:, :-16].T


def global_scale_lost(case: Any, torch: Any) -> Any:
    """The global scale of the weights is not applied."""
    return right(case) / case.weight.factor


def one_nan(case: Any, torch: Any) -> Any:
    """One NaN in the last place."""
    out = right(case)
    out[-1, -1] = torch.nan
    return out


def all_equal(case: Any, torch: Any) -> Any:
    """One value everywhere."""
    return torch.full_like(right(case), float(right(case)[0, 0]))


def all_zero(case: Any, torch: Any) -> Any:
    """A kernel that did not run."""
    return torch.zeros_like(right(case))


WRONG = (
    moved_scales,
    tiled_scales,
    swapped_nibbles,
    truncated,
    last_block_lost,
    global_scale_lost,
    one_nan,
    all_equal,
    all_zero,
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_kernel_is_caught(
    linear: list[Any], reference: Any, torch: Any, wrong: Callable[[Any, Any], Any]
) -> None:
    caught = [
        case.name
        for case in linear
        if reference.judge(wrong(case, torch).to(torch.bfloat16), case.expected)["problems"]
    ]
    assert "random" in caught or "any scales" in caught
    assert len(caught) >= 2, caught


def test_dividing_by_a_scale_that_is_zero_is_caught(
    linear: list[Any], reference: Any, torch: Any
) -> None:
    """A quantiser without the guard: 0/0 where a block is all zero, or its scale rounds to zero."""
    caught = {}
    for case in linear:
        blocks = case.x.float().unflatten(-1, (-1, 16))
        scales = reference.encode_e4m3(blocks.abs().amax(-1) / 6 / case.input_scale).float()
        step = (scales * case.input_scale).unsqueeze(-1)
        x = ((blocks / step) * step).flatten(-2)
        out = x @ case.weight.dense().float().T
        caught[case.name] = reference.judge(out.to(torch.bfloat16), case.expected)["problems"]
    for name in ("activations all zero", "vanishing activations", "one huge value a row"):
        assert any("NaN" in text for text in caught[name]), name


def test_a_flush_of_subnormal_scales_is_allowed_only_for_marlin(cases: Any, reference: Any) -> None:
    for activations, allowed in (("bf16", True), ("fp4", False)):
        case = next(
            c for c in cases.LinearCases(activations).all(SHAPES) if c.name.startswith("subnormal")
        )
        assert (case.flushed is not None) is allowed
        zeros = case.expected.exact * 0
        assert reference.judge(zeros, case.expected)["problems"], "it is no right result otherwise"
        if allowed:
            assert reference.judge(zeros, case.flushed)["problems"] == []


def test_a_second_rounding_is_allowed_where_a_kernel_has_one(
    cases: Any, reference: Any, torch: Any
) -> None:
    """Rounded, multiplied by a third, rounded, as Marlin did up to vLLM 0.19."""
    case = cases.LinearCases("bf16").ordinary(40, 64, 256)
    third = type(case.weight)(case.weight.codes, case.weight.scales, 1 / 3)
    expected = reference.expect(
        case.x.double(), third.dense(), products="bf16", quanta=torch.zeros(1, 1)
    )
    once = (case.x.float() @ (third.dense() * 3).float().T).to(torch.bfloat16)
    twice = (once.float() * (1 / 3)).to(torch.bfloat16)
    assert reference.judge(twice, expected)["problems"]
    assert reference.judge(twice, reference.rounded_again(expected, 1))["problems"] == []


def test_a_wrong_shape_is_reported(linear: list[Any], reference: Any) -> None:
    verdict = reference.judge(right(linear[2])[:, :-1], linear[2].expected)
    assert verdict["problems"] == ["shape (17, 95) instead of (17, 96)"]


def test_an_expectation_of_zeros_may_be_one_value(linear: list[Any], reference: Any) -> None:
    case = next(case for case in linear if case.name == "weights all zero")
    assert case.expected.same()
    assert reference.judge(case.expected.exact, case.expected)["problems"] == []


# ------------------------------------------------------------------------------------------- FP8


def test_fp8(cases: Any, reference: Any, torch: Any) -> None:
    found = list(cases.fp8_cases(SHAPES))
    assert len(found) == 2 * len(SHAPES) + 3
    for case in found:
        again = (case.x.float() / case.input_scale).to(torch.float8_e4m3fn).double()
        assert bool((again * case.input_scale == case.x.double()).all()), case.name
        assert reference.judge(right(case).to(torch.bfloat16), case.expected)["problems"] == []
    case = found[0]
    for wrong in (right(case) * 2, right(case).roll(1, -1), right(case) * torch.nan):
        assert reference.judge(wrong.to(torch.bfloat16), case.expected)["problems"]


# --------------------------------------------------------------------------------------- experts


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "varied"])
def mixture(request: pytest.FixtureRequest, cases: Any) -> tuple[Any, Any]:
    """Experts and tokens."""
    made = cases.make_experts(8, 256, 256, varied=request.param)
    return made, cases.make_tokens(48, 8, 2, 256)


def test_intermediate_values_are_exact(
    mixture: tuple[Any, Any], cases: Any, reference: Any
) -> None:
    """Quantised again with a global scale of 1 it is itself, but for silu(24) in float64."""
    weights, tokens = mixture
    inner = cases.between(weights, tokens)
    again = reference.quantise(inner, 1.0).dense()
    assert float(((again - inner) / inner).abs().max()) < 1e-9
    assert bool((inner != 0).all()), "each row of the up projection is met"
    assert bool((reference.quantise(tokens.x, 1.0).dense() == tokens.x).all())


def test_the_router_gives_each_chosen_expert_the_same(mixture: tuple[Any, Any], torch: Any) -> None:
    _, tokens = mixture
    shares = torch.softmax(tokens.logits().float(), dim=-1)
    assert shares.gather(1, tokens.chosen).unique().tolist() == [0.5]


@pytest.mark.parametrize("top_k", [2, 4])
def test_each_route_has_a_weight_of_its_own(top_k: int, cases: Any, torch: Any) -> None:
    """Of two neighbours, and of all routes of a token; the results are in proportion."""
    tokens = cases.dense_tokens(24, 6, top_k, 128)
    apart = cases.with_unequal_shares(tokens, whole=True)
    for one in (cases.with_unequal_shares(tokens), apart):
        flat = one.weights().flatten()
        assert bool((flat[1:] != flat[:-1]).all())
        assert all(len(set(row)) == top_k for row in one.weights().tolist())
    shares = torch.softmax(apart.logits().double(), dim=-1).gather(1, apart.chosen)
    assert bool(((shares - apart.weights()).abs() < 1e-6).all())
    weights = cases.dense_experts(6, 128, 128)
    single = dataclasses.replace(apart, shares=torch.zeros_like(apart.shares))
    total = torch.zeros_like(tokens.x)
    for slot in range(top_k):
        single.shares[...] = 0
        single.shares[:, slot] = apart.shares[:, slot]
        total += cases.expect(weights, single, "bf16").exact
    assert bool((cases.expect(weights, apart, "bf16").exact - total).abs().max() < 1e-9)


@pytest.mark.parametrize("mode", ["", "w4a16"])
def test_each_expert_has_scales_of_its_own(
    mode: str, cases: Any, launch_cases: Any, reference: Any, torch: Any
) -> None:
    """In each place another for each; and the weights are the same, exactly."""
    experts = cases.dense_experts(8, 128, 128, finer=bool(mode))
    scales = launch_cases.scales_apart(experts, mode)
    for one in (scales.w1_alpha, scales.fc2_input, scales.w2_alpha):
        assert len(set(one.tolist())) == 8
    together = scales.w2_alpha / scales.fc2_input
    assert mode or len(set(together.tolist())) == 8, "both of another expert give another result"
    first = scales.w1_alpha if mode else torch.ones(8)
    second = scales.w2_alpha if mode else together
    for weight, block_scales, factor in (
        (experts.gate_up, scales.gate_up, first),
        (experts.down, scales.down, second),
    ):
        same = reference.Nvfp4(weight.codes, block_scales, factor.double()[:, None, None])
        assert bool((same.dense() == weight.dense()).all())
        assert bool((same.quanta() <= weight.quanta()).all())


def test_every_column_and_expert_is_covered(cases: Any) -> None:
    tokens = cases.make_tokens(300, 8, 2, 256)
    assert bool(tokens.x.any(0).all())
    assert set(tokens.chosen.flatten().tolist()) == set(range(8))


@pytest.mark.parametrize("finer", [False, True], ids=["FP4", "bfloat16"])
@pytest.mark.parametrize("hidden", [128, 512])
def test_dense_experts_are_exact_without_a_zero(
    hidden: int, finer: bool, cases: Any, reference: Any, torch: Any
) -> None:
    weights = cases.dense_experts(3, hidden, 128, finer=finer)
    tokens = cases.dense_tokens(64, 3, 2, hidden, finer=finer)
    for values in (tokens.x, weights.gate_up.dense(), inner := cases.between(weights, tokens)):
        assert bool((values != 0).all())
        assert bool((values.to(torch.bfloat16).double() == values).all())
    assert bool((reference.quantise(tokens.x, 1.0).dense() == tokens.x).all()) != finer
    if not finer:
        assert bool((reference.quantise(inner, 1.0).dense() == inner).all())
    single = torch.einsum("mh,erh->mer", tokens.x.float(), weights.gate_up.dense().float())
    whole = torch.einsum("mh,erh->mer", tokens.x, weights.gate_up.dense())
    assert bool((single.double() == whole).all()), "exact in float32"
    assert set(whole[..., :128].unique().tolist()) == {24.0, 48.0, 96.0}


def test_a_moved_operand_changes_each_value_of_dense_experts(cases: Any, torch: Any) -> None:
    """Two blocks of 16 columns exchanged; a token with four values hardly shows it."""
    order = torch.arange(512).reshape(-1, 16)
    order[[3, 9]] = order[[9, 3]]
    shares = []
    for weights, tokens in (
        (cases.dense_experts(3, 512, 128), cases.dense_tokens(64, 3, 2, 512)),
        (cases.make_experts(3, 512, 128), cases.make_tokens(64, 3, 2, 512)),
    ):
        moved = dataclasses.replace(tokens, x=tokens.x[:, order.flatten()])
        whole, other = (
            torch.einsum("mh,erh->mer", one.x, weights.gate_up.dense()) for one in (tokens, moved)
        )
        shares.append(float((whole != other).double().mean()))
    assert shares[0] > 0.9 > 0.2 > shares[1]


def mixed(weights: Any, tokens: Any, torch: Any, how: str = "") -> Any:
    """A right fused kernel in FP32, rounding where the bound allows it; or a wrong one."""
    both = torch.einsum("mh,erh->mer", tokens.x.float(), weights.gate_up.dense().float())
    if how == "scales of the first":
        scales = weights.gate_up.scales.float().roll(1, -1).to(torch.float8_e4m3fn)
        moved = type(weights.gate_up)(weights.gate_up.codes, scales, weights.gate_up.factor)
        both = torch.einsum("mh,erh->mer", tokens.x.float(), moved.dense().float())
    chosen = tokens.chosen.flip(1) + 1 if how == "next expert" else tokens.chosen
    chosen = chosen % tokens.experts
    out = torch.zeros(tokens.x.shape, dtype=torch.bfloat16)
    down = weights.down.dense().float()
    for slot in range(chosen.shape[1]):
        index = chosen[:, slot]
        gate, up = both[torch.arange(len(index)), index].chunk(2, dim=-1)
        if how == "gate and up swapped":
            gate, up = up, gate
        inner = gate * torch.sigmoid(gate) * up
        part = torch.einsum("mi,mhi->mh", inner, down[index]).to(torch.bfloat16)
        share = 1.0 if how == "weights lost" else 0.5
        out = (out.float() + share * part.float()).to(torch.bfloat16)
        if how == "one expert only":
            break
    return out


def test_correct_experts_pass(
    mixture: tuple[Any, Any], cases: Any, reference: Any, torch: Any
) -> None:
    weights, tokens = mixture
    for batch in cases.batches(tokens, degenerate=True):
        expected = cases.expect(weights, batch, "fp4")
        verdict = reference.judge(mixed(weights, batch, torch), expected)
        assert verdict["problems"] == [], batch.name


@pytest.mark.parametrize(
    "how",
    [
        "scales of the first",
        "next expert",
        "gate and up swapped",
        "weights lost",
        "one expert only",
    ],
)
def test_wrong_experts_are_caught(
    mixture: tuple[Any, Any], cases: Any, reference: Any, torch: Any, how: str
) -> None:
    weights, tokens = mixture
    expected = cases.expect(weights, tokens, "fp4")
    assert reference.judge(mixed(weights, tokens, torch, how), expected)["problems"]


# ------------------------------------------------------------------------------- Triton on the host

#: A kernel in Triton: sorts numbers into buckets, and adds up those of each.
BUCKETS = """
@triton.jit
def buckets(values, counts, sums, number, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < number
    held = tl.load(values + offsets, mask=mask, other=-1).to(tl.int32)
    inside = mask & (held >= 0) & (held < BUCKETS)
    rank = tl.atomic_add(counts + held, 1, sem="relaxed", mask=inside)
    tl.store(values + offsets, rank, mask=inside)
    rows = tl.arange(0, BUCKETS)
    same = (rows[:, None] == held[None, :]) & inside[None, :]
    total = tl.zeros((BUCKETS,), dtype=tl.int32)
    for step in tl.range(0, 1):
        total += tl.sum(tl.where(same, held[None, :], 0), axis=1)
    tl.store(sums + tl.program_id(0) * BUCKETS + rows, tl.cumsum(total, axis=0))
    tl.store(sums + 2 * BUCKETS, tl.max(tl.minimum(tl.maximum(held, 0), 9), axis=0))


def outside(values):
    tl.store(values + 1, 0)
"""


def test_a_triton_kernel_runs_as_the_python_that_it_is(torch: Any) -> None:
    def jit(function: Any) -> Any:
        function.fn = function
        return function

    module = types.ModuleType("written_in_triton")
    names = types.SimpleNamespace
    vars(module).update(triton=names(jit=jit), tl=names(constexpr=int))
    exec(BUCKETS, vars(module))
    host_triton = load("host_triton")
    host_triton.run_on_host(module)
    assert module.triton.cdiv(7, 4) == 2
    values = torch.tensor([2, 0, 2, 7, 2, 0], dtype=torch.int32)
    counts, sums = torch.zeros(3, dtype=torch.int32), torch.full((7,), -1, dtype=torch.int32)
    module.buckets[(2,)](values, counts, sums, 6, BUCKETS=3, BLOCK=4, num_warps=8)
    assert values.tolist() == [0, 0, 1, 7, 2, 1], "the rank of each; 7 is in no bucket"
    assert counts.tolist() == [2, 0, 3]
    assert sums.tolist() == [0, 0, 4, 0, 0, 2, 2]
    kernel = host_triton.Kernel(module.outside, module.tl)
    with pytest.raises(IndexError, match="element 1 of 1"):
        kernel[(1,)](torch.zeros(1))
