"""Reading PTX: what is understood, and what is refused with its line."""

from __future__ import annotations

import pytest

from builder.ptx.machine import PtxError
from builder.ptx.program import Program
from builder.ptx.source import Address, Name, Number, Pair, Vector, kernels_of, split
from tests.unit.ptxworld import one, source

MODULE = """//
.version 9.1
.target sm_121a
.extern .shared .align 1024 .b8 dyn[];
.visible .entry first(
	.param .align 64 .b8 first_param_0[128],
	.param .u32 first_param_1,
	.param .align 8 .b8 first_param_2[16]
)
.reqntid 32, 1, 1
{
	.reg .b32 	%r<3>;
	.shared .align 16 .b8 own[48];
	.loc 1 2 3
	mov.u32 %r1, %tid.x; // a comment; with its own ;
	/* two
	lines */ add.s32 %r2, %r1, -0x10;
	ret;
}
.visible .entry second() { ret; }
"""


def decoded(body: str) -> Program:
    (kernel,) = kernels_of(source(body)).values()
    return Program(kernel)


def test_kernels_with_their_parameters_variables_and_lines() -> None:
    kernels = kernels_of(MODULE)
    assert list(kernels) == ["first", "second"]
    first = kernels["first"]
    places = [(p.offset, p.size) for p in first.parameters.values()]
    assert places == [(0, 128), (128, 4), (136, 16)]
    assert first.parameter_bytes == 152
    assert [(v.name, v.align, v.size) for v in first.shared] == [
        ("dyn", 1024, None),
        ("own", 16, 48),
    ]
    assert [(i.name, i.line) for i in first.code] == [("mov.u32", 15), ("add.s32", 17), ("ret", 18)]
    assert first.code[1].operands == (Name("%r2"), Name("%r1"), Number(-16))
    assert first.target == "sm_121a"


def test_operands() -> None:
    body = (
        "mov.b64 {%r1, _}, %rd1; ld.global.b32 %r1, [%rd1+-8]; ld.global.b32 %r1, [%rd1 + 4];"
        "elect.sync %r1|%p1, -1; mov.f32 %f1, 0f3F800000;"
        "cp.async.bulk.prefetch [%rd1, {%r1, 5}];"
    )
    (kernel,) = kernels_of(source(body)).values()
    unpack, before, behind, elect, real, tile = kernel.code[7:13]
    assert unpack.operands[0] == Vector((Name("%r1"), Name("_")))
    assert before.operands[1] == Address(Name("%rd1"), -8)
    assert behind.operands[1] == Address(Name("%rd1"), 4)
    assert elect.operands[0] == Pair(Name("%r1"), Name("%p1"))
    assert real.operands[1] == Number(0x3F800000, 32)
    assert tile.operands[0] == Address(Name("%rd1"), 0, (Name("%r1"), Number(5)))
    assert split("a, {b, c}, [d, {e}]") == ["a", "{b, c}", "[d, {e}]"]


def test_names_in_inner_scopes_are_separate() -> None:
    """As inline assembly has them: the same label and register in several scopes."""
    part = (
        "{ .reg .b32 x; mov.b32 x, %d; @!%%p1 bra DONE; mov.b32 x, 9;"
        " DONE: add.s32 %%r5, %%r5, x; }"
    )
    body = "mov.b32 %r5, 0; setp.eq.s32 %p1, %r5, 1; " + part % 3 + part % 4
    assert one(body) == 7


def test_a_decimal_number_is_one_of_f32() -> None:
    for text, bits in (("1.0", 0x3F800000), ("-2.5", 0xC0200000), ("1.e-3", 0x3A83126F)):
        assert one(f"mov.f32 %f1, {text}; mov.b32 %r5, %f1;") == bits
    with pytest.raises(PtxError, match=r"unknown instruction mov\.f64"):
        decoded("mov.f64 %rd1, 1.0;")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("\nfrobnicate.b32 %r1, %r2;", "PTX line 12: unknown instruction frobnicate.b32"),
        ("\n\nadd.sat.u32 %r1, %r2, %r3;", "PTX line 13: unknown instruction add.sat.u32"),
        (
            "\nadd.s32 %r1, %r2, %q3;",
            "PTX line 12: unknown instruction add.s32: %q3 is not a register",
        ),
        ("\nadd.s32 %r1, %r2, %rd3;", "%rd3 has 64 bits, not 32"),
        ("\nbra NOWHERE;", "PTX line 12: a branch to a label that does not exist: NOWHERE"),
        ("\nmov.b32 %r1, a-b-c;", "PTX line 12: an unknown form of operand: a-b-c"),
        ("\n.frob 1;", "PTX line 12: an unknown directive: .frob 1"),
        ("\nld.texture.b32 %r1, [%rd1];", "unknown instruction ld.texture.b32"),
        ("\ncvt.rz.f16x2.e5m2x2 %r1, %rs1;", "unknown instruction cvt.rz.f16x2.e5m2x2"),
        ("\nshfl.sync.idx.b64 %r1, %r2, 0, 31, -1;", "unknown instruction shfl.sync.idx.b64"),
    ],
)
def test_unknown_syntax_is_an_error_with_its_line(body: str, words: str) -> None:
    with pytest.raises(PtxError) as caught:
        decoded(body)
    assert words in str(caught.value)


def test_files_that_are_not_ptx() -> None:
    with pytest.raises(PtxError, match=r"no \.target directive"):
        kernels_of("hello")
    with pytest.raises(PtxError, match=r"a \{ is never closed"):
        kernels_of(".target sm_90\n.visible .entry k() { ret;")
    with pytest.raises(PtxError, match="a statement without its ;"):
        kernels_of(".target sm_90\n.visible .entry k() { ret }")
    with pytest.raises(PtxError, match="an unknown form of parameter"):
        kernels_of(".target sm_90\n.visible .entry k(.param .texref t) { ret; }")
