"""The machine that PTX is written for: lanes, special registers, address windows, faults, formats.

numpy lacks bfloat16, E4M3, UE4M3 and E2M1: they are computed here from their bits.  PTX ISA,
"Alternate Floating-Point Data Formats"; OCP 8-bit Floating Point Specification (E4M3) and OCP
Microscaling Formats (E2M1).  Rounding is to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.errors import SparkBuildError

LANES = 32
#: The bytes of a mask without any lane, and with all of them.
NO_LANES, ALL_LANES = bytes(LANES), b"\1" * LANES
#: The position of a lane that has ended.
EXIT = 1 << 30
#: The first address of the parameter space.
PARAMETERS = 1 << 60
#: The windows of shared and local memory in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 1 << 55
#: The addresses of functions, of a module's variables, and of memory that a kernel allocates.
FUNCTIONS, DATA_BASE, HEAP = 1 << 57, 1 << 46, 1 << 45
#: Where the driver has memory for a cooperative launch: its size, and a barrier of the grid, zero
#: at first, of 32 bits each.  CUDA's ``this_grid()`` reads the address from %envreg1 and %envreg2.
COOPERATIVE, COOPERATIVE_BYTES = 1 << 44, 8
#: The offset of a block's own shared memory in the shared window: the first KiB is reserved.
SHARED_BASE = 1024
#: In the window of a cluster's shared memory, the bits above this one have the rank of a block plus
#: 1, or 0 for the own block.  Our choice.
RANK_SHIFT = 24

#: Special registers that are set when a warp is created ("Special Registers"): 32 bits each, as
#: PTX's own type of those of 64 is used for none of them.
SPECIAL = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
      for axis in "xyz"),
    "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt", "%smid", "%nsmid", "%cluster_ctarank", "%cluster_nctarank",
    "%dynamic_smem_size", "%total_smem_size", "%envreg1", "%envreg2",
)  # fmt: skip
#: Special registers that change, with their width; a clock advances whenever it is read.
CLOCKS = {"%clock": 32, "%clock_hi": 32, "%clock64": 64, "%globaltimer": 64,
          "%globaltimer_lo": 32, "%globaltimer_hi": 32}  # fmt: skip


# ------------------------------------------------------------------------------------------- faults


class PtxError(SparkBuildError):
    """PTX that is malformed, or has an unknown instruction."""

    def __init__(self, message: str, line: int = 0, hint: str = "") -> None:
        super().__init__(f"PTX line {line}: {message}" if line else message, hint=hint)
        self.what = message
        self.line = line


class Fault(Exception):
    """An invalid operation of a kernel: a wrong address, alignment, or set of lanes."""

    def __init__(self, message: str, line: int = 0, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.where = where
        #: the line of the kernel's own source
        self.source = ""

    def __str__(self) -> str:
        """The message, with PTX line, block and warp first."""
        line = f"PTX line {self.line}" if self.line else ""
        line += f" ({self.source})" if self.source else ""
        place = ", ".join(part for part in (line, self.where) if part)
        return f"{place}: {self.message}" if place else self.message


#: What Python raises where an operand has a form that nobody thought of.
NOT_UNDERSTOOD = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


def not_understood(what: str, error: Exception, line: int = 0) -> PtxError:
    """The error of something that failed in a way that says nothing of the kernel."""
    return PtxError(f"{what} is not understood ({type(error).__name__}: {str(error)[:80]})", line)


class Deadlock(Fault):
    """No thread of the grid can continue."""


# ------------------------------------------------------------------------------- formats of numbers


Lanes = NDArray[Any]

#: E2M1 by code; bit 3 is the sign.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: Both values of a byte of two codes, the low half first.
E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], 1)
#: Half-way between neighbouring magnitudes.
_E2M1_MIDDLES = (E2M1[1:8] + E2M1[:7]) / 2
#: Code of NaN, and the largest finite value, for the types without infinity.
_E4M3_NAN, _E4M3_MAX = 0x7F, 448.0
_BF16_NAN = np.uint32(0x7FFF)
SMALLEST_NORMAL = np.float32(2.0**-126)
#: The NaN of floating-point instructions, as float32 and as float16.
_NAN = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
_F16_NAN = np.uint32(0x7FFF)


def _e4m3_values() -> NDArray[np.float64]:
    """E4M3 by code, 0 to 126; bias 7, subnormals at exponent 0, code 127 is NaN."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    normal = (1 + fraction / 8) * np.exp2(exponent - 7.0)
    return np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)


_E4M3 = _e4m3_values()
#: The finite magnitudes of E5M2: of float16 with two bits of its fraction.
_E5M2 = (np.arange(0x7C, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float64)
_E4M3_MIDDLES = (_E4M3[1:] + _E4M3[:-1]) / 2
#: UE4M3 by byte: as E4M3 without a sign.  A byte with bit 7 set is invalid, and becomes NaN.
UE4M3 = np.concatenate([_E4M3, np.full(129, np.nan)])


def some(flags: NDArray[np.bool_]) -> bool:
    """Whether any of a few is true: of 32, in a fifth of the time that numpy takes."""
    return 1 in flags.tobytes()


def to_bf16(values: Lanes) -> NDArray[np.uint32]:
    """The bits of float32 values rounded to bfloat16 (``cvt.rn.bf16.f32``); NaN is 0x7FFF."""
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(
        16
    )
    nan = np.isnan(values)
    if some(nan):
        return np.where(nan, _BF16_NAN, rounded & np.uint32(0xFFFF))
    return rounded


def from_bf16(bits: Lanes) -> NDArray[np.float32]:
    """bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(values: Lanes) -> NDArray[np.uint32]:
    """The bits of float32 values rounded to float16 (``cvt.rn.f16.f32``); NaN is 0x7FFF."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(values), _F16_NAN, bits)


def from_f16(bits: Lanes) -> Lanes:
    """float16 bits as float32, exactly."""
    return _F16[bits]


def _nearest(values: Lanes, middles: Lanes) -> Lanes:
    """Code of the nearest magnitude; on a tie the even code."""
    size = np.abs(values).astype(np.float64)
    code = np.searchsorted(middles, size, side="left")
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == size)
    nearest: Lanes = code + (tie & (code % 2 == 1))
    return nearest


def to_e2m1(values: Lanes) -> NDArray[np.uint16]:
    """Codes of float32 values (``cvt.rn.satfinite.e2m1x2``); NaN is the largest, positive."""
    nan = np.isnan(values)
    code = np.where(nan, 7, _nearest(np.where(nan, 0, values), _E2M1_MIDDLES))
    return (code | np.where(np.signbit(values) & ~nan, 8, 0)).astype(np.uint16)


def to_e4m3(values: Lanes) -> NDArray[np.uint16]:
    """Codes of float32 values (``cvt.rn.satfinite.e4m3x2``); NaN stays NaN."""
    nan = np.isnan(values)
    clipped = np.clip(np.where(nan, 0, values), -_E4M3_MAX, _E4M3_MAX)
    code = np.where(nan, _E4M3_NAN, _nearest(clipped, _E4M3_MIDDLES))
    return (code | np.where(np.signbit(values) & ~nan, 0x80, 0)).astype(np.uint16)


def from_e4m3(codes: NDArray[np.uint8]) -> Lanes:
    """E4M3 bytes as float32, exactly; bit 7 is the sign, and 127 is NaN."""
    size = UE4M3[codes & 0x7F]
    values: Lanes = np.where(codes & 0x80, -size, size).astype(np.float32)
    return values


def to_e5m2(values: Lanes) -> NDArray[np.uint16]:
    """Codes of float32 values (``cvt.rn.satfinite.e5m2x2``); NaN stays NaN, as 127."""
    nan = np.isnan(values)
    clipped = np.clip(np.where(nan, 0, values), -_E5M2[-1], _E5M2[-1])
    code = np.where(nan, 0x7F, _nearest(clipped, (_E5M2[1:] + _E5M2[:-1]) / 2))
    return (code | np.where(np.signbit(values) & ~nan, 0x80, 0)).astype(np.uint16)


def from_e5m2(codes: NDArray[np.uint8]) -> Lanes:
    """E5M2 bytes as float32, exactly: the upper halves of float16."""
    return from_f16(codes.astype(np.uint16) << np.uint16(8))


def six_bits(exponents: int) -> NDArray[np.float64]:
    """E2M3 and E3M2 by code, 0 to 63: bit 5 is the sign; neither has infinity or NaN."""
    bits = 5 - exponents
    exponent, fraction = np.arange(32) >> bits, np.arange(32) % (1 << bits) / (1 << bits)
    sizes = np.where(exponent == 0, fraction, 1 + fraction)
    sizes = sizes * np.exp2(2.0 - (1 << exponents - 1) + np.maximum(exponent - 1, 0))
    return np.concatenate([sizes, -sizes])


E2M3, E3M2 = six_bits(2), six_bits(3)


def to_six_bits(values: Lanes, table: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Codes of float32 values in E2M3 or E3M2; NaN is the largest, positive."""
    sizes, nan = table[:32], np.isnan(values)
    code = np.where(nan, 31, _nearest(np.where(nan, 0, values), (sizes[1:] + sizes[:-1]) / 2))
    return (code | np.where(np.signbit(values) & ~nan, 32, 0)).astype(np.uint16)


def to_ue8m0(values: Lanes, *, up: bool, finite: bool) -> NDArray[np.uint16]:
    """UE8M0 bytes, powers of two from 2**-127, of sizes; 255 is NaN, and infinity without limit."""
    fraction, exponent = np.frexp(np.abs(values.astype(np.float64)))
    power = exponent - 1 + (up & (fraction > 0.5))
    infinite = np.isinf(values) | (power > 127)
    code = np.clip(np.where(values == 0, -127, power), -127, 127) + 127
    code = np.where(infinite, 254 if finite else 255, code)
    return np.where(np.isnan(values), 255, code).astype(np.uint16)


def from_ue8m0(codes: Any) -> Any:
    """UE8M0 bytes as powers of two, exactly in float64; 255 is NaN."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def from_e2m1(codes: NDArray[np.uint8]) -> Lanes:
    """Bytes of two E2M1 codes as pairs of float32, exactly; the low half is the first."""
    return E2M1_PAIRS[codes].astype(np.float32)


def one_nan(values: Lanes) -> Lanes:
    """float32 values with every NaN as the canonical one, 0x7FFFFFFF ("Floating-Point NaN")."""
    nan = np.isnan(values)
    return np.where(nan, _NAN, values) if some(nan) else values


def saturated(values: Lanes) -> Lanes:
    """float32 values within 0 and 1 (``.sat``); NaN is 0, and so is -0.0."""
    return np.where(values > 0, np.minimum(values, np.float32(1)), np.float32(0))


with np.errstate(invalid="ignore"):  # a processor for 64-bit Arm reports signalling NaN
    #: float32 by the bits of float16.
    _F16 = one_nan(np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32))


def flush(values: Lanes) -> Lanes:
    """Subnormal float32 values as zero of their sign (``.ftz``)."""
    small = np.abs(values) < SMALLEST_NORMAL
    if not some(small):
        return values
    return np.where(small, np.copysign(np.float32(0), values), values)
