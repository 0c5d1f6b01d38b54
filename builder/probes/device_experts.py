"""Inputs for fused mixture-of-experts kernels whose intermediate values are exact.

A fused kernel quantises the result of its first product, and a value next to a tie of E2M1 could
be rounded either way.  So the first product gives values that FP4 represents exactly:

* the gate's weights are all 1 (1/2 times 2, 1 times 1 or 2 times 1/2, by block), and a token's few
  values add up to 24, where silu(24) is 24 in FP32;
* of a token's values, each row of the up projection meets exactly one with a weight that is not
  zero, so its result is one product, 24 times which is a code times the block's scale;
* each block of 16 such rows contains a 6, so that quantising finds that scale again.

The second product then has random codes, and its sums fit into 13 fraction bits.
Some token uses every column of the up projection and every code of the down projection.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from builder.probes import device_cases as cases
from builder.probes import nvfp4_reference as reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

torch: Any = importlib.import_module("torch")

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
    """Activations [M,H] and the experts of each, all with the same weight."""

    name: str
    x: Any
    chosen: Any
    experts: int

    def logits(self) -> Any:
        """Router logits [M,E] whose softmax is 1/top-k for the chosen experts and 0 elsewhere."""
        logits = torch.full((len(self.chosen), self.experts), -200.0)
        return logits.scatter(1, self.chosen, 0.0)


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
    up = cases.codes(shape, draw, UP)
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
    down = cases.codes((count, hidden, intermediate), draw, DOWN)
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
    top_k = tokens.chosen.shape[1]
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
        exact.index_add_(0, row, part.exact / top_k)
        size.index_add_(0, row, part.exact.abs() / top_k)
        bound.index_add_(0, row, summing / top_k)
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
