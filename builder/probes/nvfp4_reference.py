"""NVFP4 and FP8 operands on the CPU, and the allowed error of a correct kernel.

Runs next to ``device_probe.py`` under the image's interpreter; needs torch, but no GPU.

**Operands.**  An NVFP4 matrix is E2M1 codes (4 bits: sign, 2 exponent, 1 mantissa), one E4M3 scale
for each 16 of a row, and one FP32 global scale.  Every value is a float64 exactly, so the reference
product is exact up to float64 rounding (2**-53).  Activations are made such that quantising
them again gives the same codes and scales: each nonzero block contains a 6, so the largest
magnitude over 6 *is* the scale, in every rounding of it.  Then the kernel under test works on
the operands that the reference used, and only summing and output rounding differ.

**Bound.**  With S = sum |a_i b_i| over the contraction, K its length, u the unit roundoff of
the output type (2**-8 for bfloat16, 2**-11 for float16; half a unit in the last place, relative)::

    |out - exact| <= u |exact| + (1 + u) A S

A is the possible loss of summing.  Let every product be a multiple of q, and the sum keep f
fraction bits. No partial sum, in any order, is larger than S; when addends are aligned to the
largest of them, the last bit kept is worth at most S 2**-f.  So with S <= q 2**f nothing is lost at
all, and A = 0. Nor is anything lost where no two products are added.  Otherwise each of at most 2K
addends (K products, at most K running sums) loses less than one such bit, by truncation: A = 2K
2**-f. f is 23 for products of bfloat16 (FP32 sums; Fasi et al. 2021, "Numerical behavior of NVIDIA
tensor cores": products exact, addition truncates).  For FP8 and FP4 operands it is 13.  An H200 was
measured to keep just that in FP8: beside 128, addends of 2**-6 are kept, beside 256 all of them are
lost (and cuBLASLt breaks bounds with f = 23 there).  No public source says how many bits a GB10
keeps of FP4 products; no tensor core with FP32 results is known to keep fewer.

Most cases here are built with S <= q 2**13, so that the bound is the output rounding alone.  A case
that cannot be adds a bound on the whole: the relative Frobenius error, 2**-5, which one wrong block
scale out of 32 exceeds.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

torch: Any = importlib.import_module("torch")

#: Values of the codes 0 to 7; bit 3 is the sign (OCP Microscaling Formats 1.0, E2M1).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Largest E2M1 and E4M3 magnitudes; smallest positive E4M3 (a subnormal).
E2M1_MAX, E4M3_MAX, E4M3_TINY = 6.0, 448.0, 2.0**-9
#: Elements that share a scale in NVFP4.
BLOCK = 16
#: Unit roundoff of the output types.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Fraction bits that a sum of products keeps, by operand type.
FRACTION_BITS = {"bf16": 23, "fp8": 13, "fp4": 13}
#: The largest error of the whole if summing may lose bits, as a Frobenius norm.
RELATIVE = 2.0**-5


def decode_e2m1(codes: Any) -> Any:
    """Codes 0 to 15 as float64, -0.0 included."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    return table[codes.long()]


def encode_e2m1(values: Any) -> Any:
    """Nearest E2M1 code, ties to the even code; beyond 6 it is 6, and -0.0 keeps its sign."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    size = values.double().abs()
    code = torch.searchsorted(middles, size.contiguous())  # first middle that is not below
    tie = torch.zeros_like(code, dtype=torch.bool)
    inside = code < len(middles)
    tie[inside] = middles[code[inside]] == size[inside]
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    return (code + 8 * torch.signbit(values).long()).to(torch.uint8)


def encode_e4m3(values: Any) -> Any:
    """Nearest E4M3 value, ties to even, and 448 beyond the range (as kernels saturate)."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)


def pack(codes: Any) -> Any:
    """Two codes a byte, the first in the low half."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def unpack(packed: Any) -> Any:
    """The codes of :func:`pack`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


@dataclasses.dataclass
class Nvfp4:
    """A matrix: codes [.., rows, K] uint8, scales [.., rows, K/16] E4M3, one global factor.

    Of several matrices the factor may be a tensor with one number for each: [E, 1, 1].
    """

    codes: Any
    scales: Any
    factor: Any = 1.0

    def dense(self) -> Any:
        """The exact values, float64."""
        scales = self.scales.double().repeat_interleave(BLOCK, dim=-1)
        return decode_e2m1(self.codes) * scales * self.factor

    def quanta(self) -> Any:
        """For each row, a power of two that divides every value."""
        factor = granules(torch.as_tensor(self.factor, dtype=torch.float64))
        return granules(self.scales.double()) * 0.5 * factor


def quantise(values: Any, factor: float) -> Nvfp4:
    """NVFP4 as kernels quantise activations: the scale is the block's largest magnitude over 6.

    Done in float64, so ties and the last bit of a scale are as the format defines them; kernels
    multiply by approximate reciprocals, which can differ where a value lies next to a tie.
    """
    blocks = values.double().unflatten(-1, (-1, BLOCK))
    scales = encode_e4m3(blocks.abs().amax(-1) / E2M1_MAX / factor)
    step = scales.double().unsqueeze(-1) * factor
    scaled = torch.where(step > 0, blocks / step, torch.zeros_like(blocks))
    codes = encode_e2m1(torch.copysign(scaled, blocks)).flatten(-2)
    return Nvfp4(codes, scales, factor)


def granules(values: Any) -> Any:
    """For each row the largest power of two that divides its values; 1 where all are zero."""
    fraction, exponent = torch.frexp(values.double())
    whole = (fraction.abs() * 2.0**53).long()
    zeros = torch.log2((whole & -whole).clamp(min=1).double()).long()
    powers = torch.where(whole == 0, 1024, exponent.long() - 53 + zeros).amin(-1)
    return torch.where(powers == 1024, 1.0, torch.pow(2.0, powers.double()))


@dataclasses.dataclass
class Expectation:
    """The exact result, and how far each element of it may be off."""

    exact: Any
    bound: Any
    #: summing may lose bits, so the whole is also limited by :data:`RELATIVE`
    lossy: bool

    def same(self) -> bool:
        """Whether all elements may be equal."""
        low, high = (self.exact - self.bound).max(), (self.exact + self.bound).min()
        return bool(low <= high)


def expect(
    left: Any, right: Any, *, products: str, quanta: Any, output: str = "bfloat16"
) -> Expectation:
    """The exact ``left @ right.T`` ([M,K] and [N,K] float64) and its bound (module docstring).

    ``products`` names the operands that the kernel multiplies (``fp4``, ``fp8``, ``bf16``);
    ``quanta`` [M,N] are what divides every product of an element.
    """
    exact = left @ right.T
    total = left.abs() @ right.abs().T
    roundoff, bits = ROUNDOFF[output], FRACTION_BITS[products]
    terms = (left != 0).double() @ (right != 0).double().T
    loses = (terms > 1) & (total > quanta * 2.0**bits)
    lost = 2.0 * left.shape[-1] * 2.0**-bits * total
    bound = roundoff * exact.abs() + (1 + roundoff) * torch.where(loses, lost, 0.0)
    return Expectation(exact, bound, bool(loses.any()))


def rounded_again(expected: Expectation, times: int) -> Expectation:
    """The expectation for a kernel that rounds its bfloat16 result this many more times."""
    if not times:
        return expected
    more = times * ROUNDOFF["bfloat16"] * (1 + 2.0**-6)
    return dataclasses.replace(expected, bound=expected.bound + more * expected.exact.abs())


def judge(output: Any, expected: Expectation) -> dict[str, Any]:
    """Compare a kernel's output with the expectation.

    ``problems`` is empty for a right one.  ``worst`` is the largest error over its bound,
    ``relative`` the Frobenius error over the Frobenius norm.
    """
    got = output.detach().to("cpu").double()
    exact, bound = expected.exact, expected.bound
    verdict: dict[str, Any] = {"problems": [], "elements": exact.numel()}
    problems: list[str] = verdict["problems"]
    if got.shape != exact.shape:
        problems.append(f"shape {tuple(got.shape)} instead of {tuple(exact.shape)}")
        return verdict
    finite = torch.isfinite(got)
    if not bool(finite.all()):
        nans = int(torch.isnan(got).sum())
        infinite = int((~finite).sum()) - nans
        problems.append(f"{nans} NaN and {infinite} infinite of {got.numel()} values")
    if got.numel() > 1 and bool((got == got.flatten()[0]).all()) and not expected.same():
        problems.append(f"every value is {float(got.flatten()[0]):g}")
    error = torch.where(finite, (got - exact).abs(), torch.inf)
    ratio = torch.where(error == 0, 0.0, error / bound)
    where = int(ratio.flatten().argmax())
    verdict["worst"] = _plain(float(ratio.flatten()[where]))
    norm = float(exact.norm())
    verdict["relative"] = _plain(float(error.norm()) / norm) if norm else 0.0
    over = int((ratio > 1).sum())
    if over:
        row, column = divmod(where, exact.shape[-1])
        problems.append(
            f"{over} of {got.numel()} values are off by more than allowed; "
            f"worst at [{row},{column}]: {float(got.flatten()[where]):.7g} instead of "
            f"{float(exact.flatten()[where]):.7g} +- {float(bound.flatten()[where]):.2g}"
        )
    elif expected.lossy and float(verdict["relative"] or 0.0) > RELATIVE:
        problems.append(f"relative error of the whole {verdict['relative']:.3g} > {RELATIVE:g}")
    return verdict


def _plain(number: float) -> float | None:
    """A number that JSON can represent."""
    return number if math.isfinite(number) else None
