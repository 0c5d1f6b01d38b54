"""The benchmark on Hopper changes what Hopper lacks, and nothing else, and loses none of it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.hopper.pack import late, late_copy, without
from benchmarks.hopper.translate import for_hopper
from tests.unit.ptxworld import run

HEAD = ".version 9.1\n.target sm_121a\n.address_size 64\n.visible .entry k_e2m1(\n)\n{\n"
MMA = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32"
    ".ue4m3 \n{%f0, %f1, %f2, %f3},\n{%r0, %r1, %r2, %r3},\n{%r4, %r5},\n{%f0, %f1, %f2, %f3},\n"
    "%r6, {%rs1, %rs2},\n%r7, {%rs1, %rs3};"
)
MAPS = "mov.b64 \t%rd1, k_param_0;\nmov.b64 %rd2, k_param_2;\ncvta.param.u64 \t%rd3, %rd1;\n"
COPY = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], "
    "[{}, {{%r8, %r9}}], [%r2];"
)


def translated(body: str) -> str:
    """The body of a kernel for Hopper; its first parameter is a tensor map of FP4 codes."""
    text = for_hopper(HEAD + body + "\n}\n", "// functions\n", {0})
    head, _, rest = text.partition("{\n")
    assert head.startswith(".version 9.0\n.target sm_90a\n.address_size 64\n// functions\n")
    return rest


#: Other writers of PTX: modifiers in another order, one register in braces.
OTHER_MMA = (
    MMA.replace(
        "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X",
        "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col",
    )
    .replace("%r6,", "{%r6},")
    .replace("%r7,", "{%r7},")
)


@pytest.mark.parametrize("written", [MMA, OTHER_MMA])
def test_the_block_scaled_mma_becomes_a_call(written: str) -> None:
    body = translated(written)
    assert "mma.sync" not in body
    order = (*(f"%r{n}" for n in range(6)), *(f"%f{n}" for n in range(4)))
    order += ("%r6", "chosen_a", "%r7", "chosen_b")
    for number, register in enumerate(order):
        assert f"st.param.b32 [p{number}], {register};" in body
    assert "mov.b32 chosen_a, {%rs1, %rs2}; mov.b32 chosen_b, {%rs1, %rs3};" in body
    assert "ld.param.b32 %f3, [d+12];" in body


def test_the_conversion_to_codes_becomes_a_call() -> None:
    body = translated("cvt.rn.satfinite.e2m1x2.f32 byte0, %r2, %r1;")
    assert "st.param.b32 [p0], %r2;" in body
    assert "st.param.b32 [p1], %r1;" in body
    assert "cvt.u8.u32 byte0, codes;" in body


def test_products_of_pairs_are_two_products() -> None:
    body = translated("mul.f32x2 %rd1, %rd2, %rd3;\nmul.rn.ftz.f32x2 %rd1, %rd2, %rd3;")
    assert "mov.b64 {a, b}, %rd2; mov.b64 {c, d}, %rd3; mul.f32 a, a, c; mul.f32 b, b, d;" in body
    assert "mul.rn.ftz.f32 b, b, d; mov.b64 %rd1, {a, b};" in body


def test_only_copies_of_codes_are_halved() -> None:
    body = translated(MAPS + COPY.format("%rd3") + COPY.format("%rd2"))
    assert "shr.s32 half, %r8, 1; " + COPY.format("%rd3").replace("%r8", "half") in body
    assert body.endswith(COPY.format("%rd2") + "\n}\n")
    assert body.count("half, ") == 2


@pytest.mark.parametrize(
    "line",
    [
        MMA.replace("mxf4nvf4", "mxf4"),
        MMA.replace("m16n8k64", "m16n8k128"),
        "cvt.rn.bf16x2.e2m1x2 %r1, byte0;",
        "add.f32x2 %rd1, %rd2, %rd3;",
    ],
)
def test_unknown_instructions_are_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="Hopper lacks"):
        translated(line)


STORES = "add.s32 %r1, %r1, 1;\nst.shared.b32 [%r1], %r2;\nst.shared.b32 [%r3], %r2;\n"
FENCE = "// begin\nfence.proxy.async.shared::cta;\n"


def test_selected_warps_wait_before_the_stores() -> None:
    lines = late(STORES + FENCE + "ret;\n" + STORES + FENCE, "odd").split("\n")
    waits = [number for number, line in enumerate(lines) if "nanosleep" in line]
    assert [lines[number + 1][:13] for number in waits] == ["st.shared.b32"] * 2
    assert [lines[number - 1] for number in waits] == ["add.s32 %r1, %r1, 1;"] * 2
    with pytest.raises(ValueError, match="does not store"):
        late(FENCE + "ret;", "odd")


def test_lines_are_removed() -> None:
    assert without("a;\nbar.sync 2, 256;\nb;", "bar.sync 2") == "a;\n\nb;"
    with pytest.raises(ValueError, match="no line matches"):
        without("a;", "bar.sync 2")


def test_the_conversion_from_codes_gives_the_same_bits() -> None:
    """All 256 pairs of codes, through the executor."""
    words = np.zeros((256, 4), np.uint32)
    words[:, 0] = np.arange(256)
    given = "{ .reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %r1; cvt.rn.f16x2.e2m1x2 %r5, a; }"
    body = translated(given).rpartition("}")[0]
    assert "e2m1" not in body
    for part in (given, body):
        assert len(np.unique(run(part, words, threads=256).out[:, 0])) == 256
    same = run(given, words, threads=256).out[:, 0] == run(body, words, threads=256).out[:, 0]
    assert same.all()


def test_a_late_copy_waits_before_each_copy_to_global_memory() -> None:
    copy = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2}], [%r3];"
    assert late_copy(f"a;\n\t{copy}\nb;\n") == f"a;\nnanosleep.u32 20000;\n\t{copy}\nb;\n"
    with pytest.raises(ValueError, match="does not copy its output"):
        late_copy("a;\n" + COPY.format("%rd1"))
