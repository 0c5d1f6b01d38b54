"""Test inputs for the kernels: ordinary ones, and those on which wrong kernels fail.

Runs next to ``device_probe.py`` under the image's interpreter.  A linear case is an activation
[M,K], an NVFP4 or FP8 weight [N,K] and the exact result; an MoE case is tokens, a routing and the
experts' weights.  All are made on the CPU from a seed, so every machine tries the same numbers.

The degenerate ones are causes of served ``!!!!!`` and NaN: a block scale that
rounds to zero (0 times 1/0), a scale factor that the kernel reads from the wrong place, an E2M1
conversion that the compiler dropped, an overflow that only the largest magnitudes reach.

Inputs of fused mixture-of-experts kernels (`make_experts`) have exact intermediate values.

A fused kernel quantises the result of its first product, and a value next to a tie of E2M1 could
be rounded either way.  So the first product gives values that FP4 represents exactly:

* the gate's weights are all 1 (1/2 times 2, 1 times 1 or 2 times 1/2, by block), and a token's few
  values add up to 24, where silu(24) is 24 in FP32;
* of a token's values, each row of the up projection meets exactly one with a weight that is not
  zero, so its result is one product, 24 times which is a code times the block's scale;
* each block of 16 such rows contains a 6, so that quantising finds that scale again.

The second product then has random codes, and its sums fit into 13 fraction bits.
Some token uses every column of the up projection and every code of the down projection.

Such a token has four values that are not zero, so most of a kernel's operands are multiplied by
zeros, and a wrong one changes nothing.  `dense_experts` and `dense_tokens` have no zero at all:
each column has a partner in another block, with the same weights in every row, and a token has
opposite values in the two, except for one pair, which adds up to 24.  Everything else cancels,
exactly in float32 (13 fraction bits are not enough), and only if each value meets its own weight
and scales.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import TYPE_CHECKING, Any

from builder.probes import nvfp4_reference as reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

torch: Any = importlib.import_module("torch")

BLOCK = 16
#: How often each E2M1 magnitude is drawn.  Small ones more often, so that sums stay within 13
#: fraction bits (see nvfp4_reference); all eight occur.
WEIGHTS = (2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0)


@dataclasses.dataclass
class LinearCase:
    """One product: its operands, and the valid results."""

    name: str
    x: Any
    weight: Any
    input_scale: float
    expected: Any
    #: a second valid result: that of kernels that lose subnormal weight scales
    flushed: Any = None

    @property
    def shape(self) -> str:
        """MxNxK."""
        rows, columns = self.expected.exact.shape
        return f"{rows}x{columns}x{self.x.shape[-1]}"


def codes(shape: Sequence[int], generator: Any, weights: Sequence[float] = WEIGHTS) -> Any:
    """Random E2M1 codes of both signs; ``weights`` are how often each magnitude is drawn."""
    chances = torch.tensor([*weights, *weights])
    count = math.prod(shape)
    drawn = torch.multinomial(chances, count, replacement=True, generator=generator)
    return drawn.to(torch.uint8).reshape(tuple(shape))


def scales(shape: Sequence[int], choices: Sequence[float], generator: Any) -> Any:
    """E4M3 scales, each one of ``choices``."""
    picked = torch.randint(len(choices), tuple(shape), generator=generator)
    return torch.tensor(choices, dtype=torch.float32)[picked].to(torch.float8_e4m3fn)


def operand(
    rows: int, columns: int, choices: Sequence[float], generator: Any, factor: float = 1.0
) -> Any:
    """A random matrix; ``choices`` are its block scales."""
    drawn = codes((rows, columns), generator)
    return reference.Nvfp4(drawn, scales((rows, columns // BLOCK), choices, generator), factor)


def with_sixes(matrix: Any, generator: Any) -> Any:
    """Put a 6 into each block, so that quantising the values again changes nothing."""
    blocks = matrix.codes.unflatten(-1, (-1, BLOCK))
    place = torch.randint(BLOCK, (*blocks.shape[:-1], 1), generator=generator)
    signs = blocks.gather(-1, place) & 8
    sixes = blocks.scatter(-1, place, signs | 7).flatten(-2)
    return reference.Nvfp4(sixes, matrix.scales, matrix.factor)


def all_scales(low: float, high: float) -> list[float]:
    """Every positive E4M3 value from ``low`` to ``high``."""
    values = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return [float(v) for v in values if low <= v <= high]


class LinearCases:
    """The cases for one kind of kernel.

    ``activations`` is what the kernel multiplies: ``fp4`` (it quantises them itself) or ``bf16``.
    """

    #: scales of ordinary activations' blocks; with more than one a tensor core may lose bits
    blocks: tuple[float, ...] = (1.0,)

    def __init__(self, activations: str, seed: int = 0) -> None:
        self.activations = activations
        self.generator = torch.Generator().manual_seed(seed)

    def case(self, name: str, left: Any, weight: Any) -> LinearCase:
        """Make the case for two operands."""
        expected = reference.expect(
            left.dense(),
            weight.dense(),
            products=self.activations,
            quanta=left.quanta()[:, None] * weight.quanta()[None, :],
        )
        x = left.dense().to(torch.bfloat16)
        return LinearCase(name, x, weight, left.factor, expected)

    def ordinary(self, m: int, n: int, k: int) -> LinearCase:
        """Random codes; powers of two as scales, so that sums are exact in any order."""
        left = with_sixes(operand(m, k, self.blocks, self.generator, 0.5), self.generator)
        rows = 2.0 ** torch.randint(-2, 3, (m, 1), generator=self.generator)
        left.scales = (left.scales.float() * rows).to(torch.float8_e4m3fn)
        return self.case("random", left, operand(n, k, (1.0, 2.0), self.generator, 0.25))

    def any_scales(self, m: int, n: int, k: int) -> LinearCase:
        """Random codes, every scale from 1/4 to 16, a global scale that is no power of 2."""
        every = all_scales(0.25, 16.0)
        left = with_sixes(operand(m, k, every, self.generator, 0.125), self.generator)
        return self.case("any scales", left, operand(n, k, every, self.generator, 3.0 / 64))

    def single(self, m: int, n: int, k: int) -> LinearCase:
        """One value per row: each result is one product, so a misplaced scale is visible."""
        left = self.zeros(m, k)
        column = torch.randperm(k, generator=self.generator).repeat(m // k + 1)[:m]
        rows = torch.arange(m)
        left.codes[rows, column] = 7
        left.scales[rows, column // BLOCK] = 1.0
        every = all_scales(reference.E4M3_TINY, reference.E4M3_MAX)
        normal = [value for value in every if value >= 2.0**-6]
        return self.case("one value a row", left, operand(n, k, normal, self.generator, 0.5))

    def zeros(self, rows: int, columns: int) -> Any:
        """A matrix of zeros with zero scales."""
        empty = torch.zeros(rows, columns // BLOCK).to(torch.float8_e4m3fn)
        return reference.Nvfp4(torch.zeros(rows, columns, dtype=torch.uint8), empty, 1.0)

    def degenerate(self, m: int, n: int, k: int) -> Iterator[LinearCase]:
        """Inputs for which a wrong kernel returns NaN, infinity or a single value."""
        draw = self.generator
        left = with_sixes(operand(m, k, (1.0,), draw), draw)
        weight = operand(n, k, (1.0, 2.0), draw)
        yield self.case("activations all zero", self.zeros(m, k), weight)
        nothing = reference.Nvfp4(torch.zeros_like(weight.codes), weight.scales, 1.0)
        yield self.case("weights all zero", left, nothing)
        minus = reference.Nvfp4(torch.full_like(weight.codes, 8), weight.scales, 1.0)
        yield self.case("weights all -0.0", left, minus)
        yield self.case("every other block scale zero", left, self.halved(weight))
        yield self.case("subnormal block scales", left, operand(n, k, all_scales(0, 0.0137), draw))
        largest = self.zeros(m, k)
        largest.codes[:, 0], largest.scales[:, 0] = 7, reference.E4M3_MAX
        yield self.case("one huge value a row", largest, weight)
        yield self.case("largest magnitudes", self.extreme(m, k), self.extreme(n, k))
        equal = reference.Nvfp4(left.codes[:1].repeat(m, 1), left.scales[:1].repeat(m, 1), 1.0)
        yield self.case("equal rows", equal, weight)
        yield self.vanishing(m, k, weight)

    def halved(self, weight: Any) -> Any:
        """The same codes, with every other block zero."""
        scales = weight.scales.float()
        scales[:, ::2] = 0
        return reference.Nvfp4(weight.codes, scales.to(torch.float8_e4m3fn), weight.factor)

    def extreme(self, rows: int, columns: int) -> Any:
        """Largest codes under the largest scales, each row of one sign."""
        sign = torch.randint(2, (rows, 1), generator=self.generator).to(torch.uint8) * 8
        full = torch.full((rows, columns // BLOCK), reference.E4M3_MAX)
        return reference.Nvfp4((sign | 7).repeat(1, columns), full.to(torch.float8_e4m3fn), 1.0)

    def vanishing(self, m: int, k: int, weight: Any) -> LinearCase:
        """Activations whose block scale rounds to zero: dividing by it must not give NaN.

        A kernel that quantises them gets zeros; one that does not, the product.  Both, and
        anything between, are finite and within the sum of magnitudes.
        """
        values = torch.full((m, k), 2.0**-30, dtype=torch.float64)
        dense = weight.dense()
        total = values @ dense.abs().T
        expected = reference.Expectation(torch.zeros_like(total), total * (1 + 2.0**-8), False)
        x = values.to(torch.bfloat16)
        return LinearCase("vanishing activations", x, weight, 1.0, expected)

    def nothing(self, case: LinearCase) -> Any:
        """Tiny values: Marlin's result for scales below 2**-6 that it does not rescale.

        It reads a scale as one of five exponent bits without a sign, taking the first of them for
        set.  Where it is not, the scale is worth 2**-112 of itself (vLLM up to 0.19), or was set to
        zero before (later, unless all of a matrix are that small).
        """
        size = case.x.double().abs() @ case.weight.dense().abs().T
        return reference.Expectation(torch.zeros_like(size), size * 2.0**-100, False)

    def all(self, shapes: Sequence[Sequence[int]]) -> Iterator[LinearCase]:
        """Every case: the ordinary ones in every shape, the others in the middle one."""
        for m, n, k in shapes:
            yield self.ordinary(m, n, k)
            yield self.any_scales(m, n, k)
        m, n, k = shapes[len(shapes) // 2]
        yield self.single(max(m, 64), n, k)
        for case in self.degenerate(m, n, k):
            if case.name.startswith("subnormal") and self.activations == "bf16":
                case.flushed = self.nothing(case)
            yield case


# --- FP8 ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fp8:
    """A matrix of E4M3 values and one factor."""

    values: Any
    factor: float

    def dense(self) -> Any:
        """The exact values, float64."""
        return self.values.double() * self.factor


def fp8_cases(shapes: Sequence[Sequence[int]], seed: int = 0) -> Iterator[LinearCase]:
    """Per-tensor FP8: operands of small whole numbers, of every E4M3 value, and degenerate ones."""
    draw = torch.Generator().manual_seed(seed)

    def whole(rows: int, columns: int, factor: float) -> Fp8:
        numbers = torch.randint(-4, 5, (rows, columns), generator=draw).float()
        return Fp8(numbers.to(torch.float8_e4m3fn), factor)

    def every(rows: int, columns: int, factor: float) -> Fp8:
        bits = torch.randint(0, 126, (rows, columns), generator=draw)
        signs = torch.randint(2, (rows, columns), generator=draw) * 128
        return Fp8((bits + signs).to(torch.uint8).view(torch.float8_e4m3fn), factor)

    def case(name: str, left: Fp8, right: Fp8) -> LinearCase:
        quanta = reference.granules(left.dense())[:, None] * reference.granules(right.dense())
        expected = reference.expect(left.dense(), right.dense(), products="fp8", quanta=quanta)
        return LinearCase(name, left.dense().to(torch.bfloat16), right, left.factor, expected)

    for m, n, k in shapes:
        yield case("random", whole(m, k, 0.5), whole(n, k, 0.25))
        yield case("any values", every(m, k, 0.5), every(n, k, 0.25))
    m, n, k = shapes[len(shapes) // 2]
    right = whole(n, k, 1.0)
    yield case("activations all zero", Fp8(torch.zeros(m, k).to(torch.float8_e4m3fn), 1.0), right)
    yield case(
        "weights all zero",
        whole(m, k, 1.0),
        Fp8((right.values.float() * 0).to(torch.float8_e4m3fn), 1.0),
    )
    largest = torch.full((m, k), reference.E4M3_MAX).to(torch.float8_e4m3fn)
    yield case("largest magnitudes", Fp8(largest, 1.0), right)


# ----------------------------------------------------------- experts with exact intermediate values

#: A token's nonzero values, one in each class of columns: their sum is the gate's 24.
VALUES = (6.0, 6.0, 6.0, 6.0)
SPREAD = len(VALUES)
#: Others with the sum 32; FP4 cannot represent most of them, so rounding them changes the results.
FINER = (7.0, 9.0, 5.0, 11.0)
#: How often each E2M1 magnitude is drawn: no zero in the up projection, which would leave a row
#: without its product; small ones in the down projection, to keep sums small.
UP = (0.0, 8.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0)
DOWN = (12.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5)


@dataclasses.dataclass
class Experts:
    """Weights of E experts in a checkpoint's layout: gate and up [E,2I,H], down [E,H,I]."""

    gate_up: Any
    down: Any

    def hidden(self) -> int:
        """H."""
        return int(self.down.codes.shape[1])


@dataclasses.dataclass
class Tokens:
    """Activations [M,H] and the experts of each."""

    name: str
    x: Any
    chosen: Any
    experts: int
    #: the weight of each route [M,top-k], float64; None: the same for all, and 1 for each token
    shares: Any = None

    def weights(self) -> Any:
        """The weight of each route."""
        top_k = self.chosen.shape[1]
        equal = torch.full(self.chosen.shape, 1.0 / top_k, dtype=torch.float64)
        return equal if self.shares is None else self.shares

    def logits(self) -> Any:
        """Router logits [M,E] whose softmax is in proportion to the routes' weights, else 0."""
        logits = torch.full((len(self.chosen), self.experts), -200.0, dtype=torch.float64)
        top_k = self.chosen.shape[1]
        return logits.scatter(1, self.chosen, torch.log(self.weights() * top_k)).float()


def make_experts(
    count: int,
    hidden: int,
    intermediate: int,
    *,
    varied: bool = False,
    finer: bool = False,
    seed: int = 0,
) -> Experts:
    """Random experts as the module describes; ``hidden`` is a multiple of 64.

    With ``varied``, the scales of up and down differ from block to block too; sums then need more
    than 13 bits, and have the looser bound.  ``finer`` experts have every mantissa of E4M3
    in the scales of down, and of up those that bfloat16 holds times FINER: for kernels that
    multiply bfloat16.
    """
    draw = torch.Generator().manual_seed(seed)
    shape = (count, intermediate, hidden)
    up = codes(shape, draw, UP)
    rows = up.unflatten(1, (-1, reference.BLOCK))
    place = torch.randint(reference.BLOCK, (count, rows.shape[1], 1, hidden), generator=draw)
    rows = rows.scatter(2, place, (rows.gather(2, place) & 8) | 7)
    row_class = (torch.arange(intermediate) // reference.BLOCK) % SPREAD
    met = row_class[:, None] == column_class(hidden)[None, :]
    up = torch.where(met, rows.flatten(1, 2), 0).to(torch.uint8)
    blocks = (count, intermediate, hidden // reference.BLOCK)
    # code 1 is 1/2, 2 is 1 and 4 is 2: times 2, 1 and 1/2 each is 1
    powers = torch.randint(0, 3, blocks, generator=draw)
    gate = (2**powers).to(torch.uint8).repeat_interleave(reference.BLOCK, dim=-1)
    groups = (count, intermediate // reference.BLOCK, blocks[2])
    sizes = 2.0 ** torch.randint(-1 if varied else 0, 1, groups, generator=draw)
    up_scales = sizes.repeat_interleave(reference.BLOCK, dim=1)
    if finer:
        up_scales = up_scales * (1 + torch.randint(4, blocks, generator=draw) / 4)
    both = torch.cat([2.0 ** (1 - powers), up_scales], dim=1).to(torch.float8_e4m3fn)
    down = codes((count, hidden, intermediate), draw, DOWN)
    row_sizes = 2.0 ** torch.randint(-2, 3, (count, hidden, 1), generator=draw)
    inner = (count, hidden, intermediate // reference.BLOCK)
    sizes = torch.randint(-2, 3 if varied else -1, inner, generator=draw)
    mantissas = 1 + torch.randint(8, inner, generator=draw) / 8 if finer else 1.0
    return Experts(
        reference.Nvfp4(torch.cat([gate, up], dim=1), both, 1.0),
        reference.Nvfp4(down, (row_sizes * 2.0**sizes * mantissas).to(torch.float8_e4m3fn), 0.5),
    )


def column_class(hidden: int) -> Any:
    """The SPREAD class of a column: blocks of 16 alternate."""
    return (torch.arange(hidden) // reference.BLOCK) % SPREAD


def make_tokens(
    count: int,
    experts: int,
    top_k: int,
    hidden: int,
    seed: int = 0,
    values: Sequence[float] = VALUES,
) -> Tokens:
    """Tokens with one of ``values`` in each class of columns, in places that differ."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.zeros(count, hidden, dtype=torch.float64)
    classes = column_class(hidden)
    for number in range(SPREAD):
        columns = torch.nonzero(classes == number).flatten()
        order = torch.randperm(len(columns), generator=draw).repeat(count // len(columns) + 1)
        x[torch.arange(count), columns[order[:count]]] = values[number]
    chosen = torch.rand(count, experts, generator=draw).topk(top_k).indices
    return Tokens("random", x, chosen, experts)


#: The sum of a dense token's two values that do not cancel, and how that is divided: where FP4
#: holds the values, and where it need not.
WHOLE, HALVES, FINER_HALVES = 24.0, (12.0, 12.0), (11.0, 13.0)


def partners(hidden: int) -> Any:
    """For each column the one that cancels it, in another block of 16; always the same.

    ``hidden`` is a multiple of 32.
    """
    draw = torch.Generator().manual_seed(hidden)
    size = reference.BLOCK
    first, second = torch.randperm(hidden // size, generator=draw).reshape(-1, 2).T * size
    inner = torch.stack([torch.randperm(size, generator=draw) for _ in first])
    ones, others = first[:, None] + torch.arange(size), second[:, None] + inner
    partner = torch.empty(hidden, dtype=torch.long)
    partner[ones], partner[others] = others, ones
    return partner


def signs(hidden: int) -> Any:
    """+1 or -1 for each column, the same for partners."""
    draw = torch.Generator().manual_seed(hidden + 1)
    drawn = torch.randint(2, (hidden,), generator=draw) * 2 - 1
    return drawn[torch.minimum(torch.arange(hidden), partners(hidden))]


def dense_experts(
    count: int, hidden: int, intermediate: int, *, finer: bool = False, seed: int = 0
) -> Experts:
    """Experts for `dense_tokens`: as those of `make_experts`, but without zeros in gate and up.

    In a column, 16 neighbouring rows of the gate have one value, 1, 2 or 4 times the column's
    sign, and of up one scale and a 6: then each block of the intermediate values is exact in FP4.
    """
    down = make_experts(count, hidden, intermediate, finer=finer, seed=seed).down
    draw = torch.Generator().manual_seed(seed + 1)
    size = reference.BLOCK
    groups = (count, intermediate // size)
    first = torch.minimum(torch.arange(hidden), partners(hidden))  # of each pair
    rows = codes((*groups, size, hidden), draw, UP)
    place = torch.randint(size, (*groups, 1, hidden), generator=draw)
    rows = rows.scatter(2, place, (rows.gather(2, place) & 8) | 7)
    up = rows.flatten(1, 2)[..., first]
    of_block = first[::size] // size
    sizes = 2.0 ** torch.randint(-4, -2, (*groups, hidden // size), generator=draw)
    up_scales = sizes.repeat_interleave(size, dim=1)
    if finer:
        up_scales = up_scales * (1 + torch.randint(4, up_scales.shape, generator=draw) / 4)
    values = 2.0 ** torch.randint(3, (*groups, hidden), generator=draw)
    values = (values[..., first] * signs(hidden)).repeat_interleave(size, dim=1)
    gate_scales = 2.0 ** torch.randint(2, up_scales.shape, generator=draw)
    gate = reference.encode_e2m1(values / gate_scales.repeat_interleave(size, dim=-1))
    scales = torch.cat([gate_scales, up_scales[..., of_block]], dim=1).to(torch.float8_e4m3fn)
    return Experts(reference.Nvfp4(torch.cat([gate, up], dim=1), scales, 1.0), down)


def dense_tokens(
    count: int, experts: int, top_k: int, hidden: int, *, finer: bool = False, seed: int = 0
) -> Tokens:
    """Tokens without zeros, for `dense_experts`: all but one pair of columns cancel.

    Most ``finer`` values cannot be represented in FP4.
    """
    draw = torch.Generator().manual_seed(seed)
    partner, size = partners(hidden), reference.BLOCK
    blocks = (count, hidden // size)
    exponents = torch.randint(3, blocks, generator=draw)
    drawn = with_sixes(reference.Nvfp4(codes((count, hidden), draw, UP), None), draw).codes
    values = reference.decode_e2m1(drawn)
    if finer:
        values = torch.randint(8, 16, (count, hidden), generator=draw).double() * 2 - 1
        values = values * (torch.randint(2, (count, hidden), generator=draw) * 2 - 1)
    row, columns = torch.arange(count), torch.arange(hidden)
    first = torch.minimum(columns, partner)
    met = torch.randperm(hidden, generator=draw).repeat(count // hidden + 1)[:count]
    exponents[row, first[met] // size] = 1
    if not finer:
        values = values * (2.0**exponents).repeat_interleave(size, dim=-1)
    x = torch.where(first == columns, values, -values[:, first])
    halves = FINER_HALVES if finer else HALVES
    for column, half in zip((met, partner[met]), halves, strict=True):
        x[row, column] = half * signs(hidden)[met].double()
    chosen = torch.rand(count, experts, generator=draw).topk(top_k).indices
    return Tokens("dense", x, chosen, experts)


def with_unequal_shares(tokens: Tokens, *, whole: bool = False) -> Tokens:
    """The same tokens, with a weight for each route that its neighbours do not have.

    1, 1/2, 1/4 and so on in turn: powers of two round nothing, and the turns are one longer than
    the routes of a token.  ``whole``: those of a token add up to 1, as a router's do.
    """
    top_k = tokens.chosen.shape[1]
    turn = torch.arange(tokens.chosen.numel()).reshape(tokens.chosen.shape) % (top_k + 1)
    shares = 0.5 ** turn.double()
    return dataclasses.replace(tokens, shares=shares / shares.sum(-1, True) if whole else shares)


def between(experts: Experts, tokens: Tokens) -> Any:
    """silu(gate) * up for each token and chosen expert, [M,top-k,I] float64.

    Exact: silu(24) is 24 but for 1e-9, which a kernel's FP32 cannot hold, and which would turn
    sums that are zero into 1e-14 here.
    """
    both = torch.einsum("mh,erh->mer", tokens.x, experts.gate_up.dense())
    index = tokens.chosen[:, :, None].expand(-1, -1, both.shape[-1])
    gate, up = both.gather(1, index).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).round(decimals=3)


def expect(experts: Experts, tokens: Tokens, products: str, roundings: int | None = None) -> Any:
    """The exact result and its bound.

    Each expert's share is rounded to bfloat16 at most once, and again for every addition to
    the others' sum: top-k + 1 roundings of at most the sum of magnitudes, or a known number.
    """
    inner = between(experts, tokens)
    top_k, weights = tokens.chosen.shape[1], tokens.weights()
    dense = experts.down.dense()
    exact = torch.zeros_like(tokens.x)
    size = torch.zeros_like(tokens.x)
    bound = torch.zeros_like(tokens.x)
    lossy = False
    roundoff = reference.ROUNDOFF["bfloat16"]
    left = reference.granules(inner)
    right = experts.down.quanta()
    for expert in range(tokens.experts):
        row, slot = torch.nonzero(tokens.chosen == expert, as_tuple=True)
        if not len(row):
            continue
        part = reference.expect(
            inner[row, slot],
            dense[expert],
            products=products,
            quanta=left[row, slot][:, None] * right[expert][None, :],
        )
        summing = part.bound - roundoff * part.exact.abs()
        share = weights[row, slot][:, None]
        exact.index_add_(0, row, part.exact * share)
        size.index_add_(0, row, part.exact.abs() * share)
        bound.index_add_(0, row, summing * share)
        lossy |= part.lossy
    bound += (roundings or top_k + 1) * roundoff * (1 + 2.0**-6) * size
    return reference.Expectation(exact, bound, lossy)


def batches(tokens: Tokens, *, degenerate: bool) -> Iterator[Tokens]:
    """Batches of tokens: ordinary ones, and those that wrong kernels turn into NaN."""
    yield tokens
    if not degenerate:
        return
    count, chosen = len(tokens.x), tokens.chosen
    nothing = torch.zeros_like(tokens.x)
    yield dataclasses.replace(tokens, name="activations all zero", x=nothing)
    same = chosen[:1].repeat(count, 1)
    yield dataclasses.replace(tokens, name="all to the same experts", chosen=same)
    first = tokens.x[:1].repeat(count, 1)
    yield dataclasses.replace(tokens, name="equal tokens", x=first, chosen=same)
