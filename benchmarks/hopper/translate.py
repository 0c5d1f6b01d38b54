"""PTX of an SM12x kernel as PTX that Hopper runs.

Hopper has all that these kernels do but a few things, which become calls of ``software.cu``'s
functions or other arithmetic:

* the block-scaled MMA of FP4 codes;
* the conversion of two floats to FP4 codes and of two codes to f16, and the product of two pairs of
  floats;
* tensor maps of FP4 codes: the same bytes are copied as a tensor of bytes, so the first coordinate
  is halved.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_GROUP = r"\{([^}]*)\}"
#: A register alone, or in braces.
_ONE = r"\{?(%\w+)\}?"
_MMA = re.compile(
    # the order of the modifiers differs between PTX writers
    r"mma\.sync\.aligned(?=\S*\.m16n8k64\.)(?=\S*\.kind::mxf4nvf4\.)\S+\s*"
    rf"{_GROUP},\s*{_GROUP},\s*{_GROUP},\s*{_GROUP},"
    rf"\s*{_ONE},\s*{_GROUP},\s*{_ONE},\s*{_GROUP};"
)
_TO_FP4 = re.compile(r"cvt\.rn\.satfinite\.e2m1x2\.f32\s+(%?\w+),\s*(%\w+),\s*(%\w+);")
_FROM_FP4 = re.compile(r"cvt\.rn\.f16x2\.e2m1x2\s+(%\w+),\s*(%?\w+);")
_PAIRS = re.compile(r"mul((?:\.rn)?(?:\.ftz)?)\.f32x2\s+(%\w+),\s*(%\w+),\s*(%\w+);")
_COPY = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.\S+ \[[^\]]*\], \[(%rd\d+), \{(%r\d+)[^;]*;")
_MAP = re.compile(r"(?:mov\.b64|cvta\.param\.u64)\s+(%rd\d+), (?:\w+_param_(\d+)|(%rd\d+));")
#: What must be gone from the text: nothing else of it may be lost in silence.
_LEFT = ("mxf4", "e2m1", "f32x2", "sm_12")


def for_hopper(ptx: str, functions: str, fp4_maps: Collection[int]) -> str:
    """The kernel for ``sm_90a``; ``fp4_maps`` are its parameters that are tensor maps of FP4 codes.

    Raises:
        ValueError: it holds something else that Hopper lacks.
    """
    maps = _maps(ptx)
    ptx = _TO_FP4.sub(_to_fp4, _MMA.sub(_mma, ptx))
    ptx = _PAIRS.sub(_product, _FROM_FP4.sub(_from_fp4, ptx))
    ptx = _COPY.sub(lambda copy: _copy(copy, maps, fp4_maps), ptx)
    ptx = re.sub(r"(?m)^\.version .*$", ".version 9.0", ptx, count=1)
    ptx = re.sub(r"(?m)^\.target .*$", ".target sm_90a", ptx, count=1)
    for word in _LEFT:
        found = re.search(rf"(?m)^(?!\s*//).*{word}.*$", _without_names(ptx))
        if found:
            raise ValueError(f"Hopper lacks: {found[0].strip()[:120]}")
    head, size, rest = ptx.partition(".address_size 64\n")
    return f"{head}{size}{functions}{rest}"


def functions_of(ptx: str) -> str:
    """The functions of a compiled ``software.cu``, without its head."""
    return ptx[ptx.index(".visible .func") :]


def _without_names(ptx: str) -> str:
    """Without the kernel's name, which may speak of its types."""
    name = re.search(r"\.entry (\w+)", ptx)
    return ptx.replace(name[1], "kernel") if name else ptx


def _maps(ptx: str) -> dict[str, int]:
    """The parameter behind each register that holds the address of one."""
    known: dict[str, int] = {}
    for register, number, other in _MAP.findall(ptx):
        if number or other in known:
            known[register] = int(number) if number else known[other]
    return known


def _mma(match: re.Match[str]) -> str:
    out, left, right, added, *scales = match.groups()
    (scale_a, choice_a, scale_b, choice_b) = scales
    given = [one.strip() for group in (left, right, added) for one in group.split(",")]
    given += [scale_a, "chosen_a", scale_b, "chosen_b"]
    taken = [f"ld.param.b32 {one.strip()}, [d+{4 * n}];" for n, one in enumerate(out.split(","))]
    return " ".join([
        "{ .reg .b32 chosen_a, chosen_b; .param .align 4 .b8 d[16];",
        f"mov.b32 chosen_a, {{{choice_a}}}; mov.b32 chosen_b, {{{choice_b}}};",
        *(f".param .b32 p{n}; st.param.b32 [p{n}], {one};" for n, one in enumerate(given)),
        f"call.uni (d), software_mma, ({', '.join(f'p{n}' for n in range(len(given)))});",
        *taken,
        "}",
    ])  # fmt: skip


def _to_fp4(match: re.Match[str]) -> str:
    out, high, low = match.groups()
    return (
        "{ .reg .b32 codes; .param .b32 d; "
        f".param .b32 p0; st.param.b32 [p0], {high}; .param .b32 p1; st.param.b32 [p1], {low}; "
        "call.uni (d), software_codes, (p0, p1); ld.param.b32 codes, [d]; "
        f"cvt.u8.u32 {out}, codes; }}"
    )


def _from_fp4(match: re.Match[str]) -> str:
    """Exponent and fraction of E2M1 as those of f16, whose bias is 14 more; then the signs."""
    out, codes = match.groups()
    return (
        f"{{ .reg .b32 c, t, s, u; cvt.u32.u8 c, {codes}; "
        "and.b32 t, c, 7; shl.b32 t, t, 9; and.b32 u, c, 0x70; shl.b32 u, u, 21; or.b32 t, t, u; "
        "and.b32 s, c, 8; shl.b32 s, s, 12; and.b32 u, c, 0x80; shl.b32 u, u, 24; or.b32 s, s, u; "
        f"mov.b32 u, 0x74007400; mul.rn.f16x2 t, t, u; or.b32 {out}, t, s; }}"
    )


def _product(match: re.Match[str]) -> str:
    how, out, left, right = match.groups()
    return (
        "{ .reg .b32 a, b, c, d; "
        f"mov.b64 {{a, b}}, {left}; mov.b64 {{c, d}}, {right}; "
        f"mul{how}.f32 a, a, c; mul{how}.f32 b, b, d; mov.b64 {out}, {{a, b}}; }}"
    )


def _copy(match: re.Match[str], maps: dict[str, int], fp4_maps: Collection[int]) -> str:
    text, register, first = match[0], match[1], match[2]
    if maps.get(register) not in fp4_maps:
        return text
    halved = text.replace(f"{{{first}", "{half", 1)
    return f"{{ .reg .b32 half; shr.s32 half, {first}, 1; {halved} }}"
