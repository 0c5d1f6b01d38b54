"""Kernels run from Python: arrays in and out, races and faults as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from builder.errors import UsageError
from builder.ptx import api
from builder.ptx.api import Pointer, run
from builder.ptx.machine import PtxError
from builder.ptx.memory import TensorMap, encode_tensor

if TYPE_CHECKING:
    from pathlib import Path

ADD = """.version 8.8
.target sm_121a
.address_size 64
.visible .entry add(.param .u64 x, .param .u64 out, .param .u32 n, .param .f32 more)
{
  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %rd<4>;
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
  mad.lo.u32 %r1, %r2, %r3, %r1; ld.param.u32 %r4, [n]; setp.ge.u32 %p1, %r1, %r4;
  mul.wide.u32 %rd3, %r1, 4; ld.param.u64 %rd1, [x]; add.s64 %rd1, %rd1, %rd3;
  ld.param.u64 %rd2, [out]; {place}
  @!%p1 ld.global.f32 %f1, [%rd1]; ld.param.f32 %f2, [more]; add.f32 %f1, %f1, %f2;
  @!%p1 st.global.f32 [%rd2], %f1;
  ret;
}
"""
GOOD = ADD.replace("{place}", "add.s64 %rd2, %rd2, %rd3;")
RACY = ADD.replace("{place}", "")


def arrays(count: int = 64) -> tuple[Any, Any]:
    x = np.arange(count, dtype=np.float32)
    return x, np.zeros_like(x)


def test_arrays_go_in_and_come_out() -> None:
    x, out = arrays()
    result = run(GOOD, "add", grid=2, block=32, arguments=[x, out, 64, 0.5])
    assert result[out].tolist() == (x + 0.5).tolist()
    assert out.tolist() == [0] * 64, "what was given is left alone"
    assert (result.races, result.faults, result.differ) == ((), (), False)
    everything = "1 of 1 basic blocks and 7 of 7 lines ran"
    assert str(result) == repr(result) == f"no race and no fault; {everything}"
    result.check()
    assert [one.schedule for one in result.runs] == ["eager", "lazy", "random 1"]
    last = run(GOOD, "add", 2, 32, [Pointer(x, 128), out, np.uint32(32), np.float32(0)])
    assert last[out][:32].tolist() == x[32:].tolist()
    with pytest.raises(KeyError, match="no argument"):
        result[np.zeros(1)]


def test_what_no_schedule_reached_is_in_the_result() -> None:
    x, out = arrays()
    jump = "  setp.ge.u32 %p1, %r1, 0; @%p1 bra END;"
    skips = GOOD.replace("  ret;", f"{jump}\n  trap;\nEND:\n  ret;")
    seen = run(skips, "add", 1, 32, [x, out, 32, 0.5]).coverage
    trap = skips[: skips.index("  trap;")].count("\n") + 1
    assert seen.unreached == (f"line {trap}",)
    assert (seen.lines - seen.lines_ran, seen.blocks - seen.blocks_ran) == (1, 1)


def test_a_race_is_a_value_with_the_name_of_its_array() -> None:
    x, out = arrays()
    result = run(
        RACY, "", (2, 1), (32,), {"x": x, "out": out, "n": 64, "more": 0.0}, schedules=["eager"]
    )
    kinds = {race.kind for race in result.races}
    assert kinds == {
        "write without order after a write in the same warp",
        "write without order after a write in another block",
    }
    assert {race.memory for race in result.races} == {"out"}
    assert "1 place from out offset 0" in str(result)
    assert "2 places from out offset" in str(replace(result.races[0], places=2))
    with pytest.raises(AssertionError, match="add:\nwrite without order after a write in the same"):
        result.check()


def test_a_fault_is_a_value() -> None:
    x, out = arrays()
    (fault,) = run(GOOD, "add", 3, 32, [x, out, 96, 0.0], schedules=["lazy"]).faults
    assert fault.startswith("lazy: PTX line ")
    assert "the nearest is argument 0" in fault
    out.flags.writeable = False
    (fault,) = run(GOOD, "add", 2, 32, [x, out, 64, 0.0], schedules=["eager"]).faults
    assert "a write to argument 1" in fault


STATIC = """.version 8.8
.target sm_121a
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.visible .entry store()
{
  .shared .align 4 .b8 flag[4];
  st.shared.b32 [flag], 1; st.shared.b32 [dynamic+{at}], 1; ret;
}
"""


@pytest.mark.parametrize(("at", "faults"), [(252, 0), (256, 1)])
def test_what_aligns_dynamic_shared_memory_is_no_part_of_it(at: int, faults: int) -> None:
    ptx = STATIC.replace("{at}", str(at))
    assert len(run(ptx, "store", 1, 1, [], shared=256, schedules=["eager"]).faults) == faults


def test_wrong_arguments(tmp_path: Path) -> None:
    x, out = arrays()
    good = [x, out, 64, 0.5]
    wrong: list[tuple[list[Any], str]] = [
        (good[:3], "3 arguments; add takes 4"),
        ([x, out, np.uint64(64), 0.5], "argument 2 has 8 bytes; the parameter has 4"),
        ([x, out, 2**32, 0.5], "argument 2: 4294967296 does not fit into 4 bytes"),
        ([x, out, "64", 0.5], "argument 2 is neither an array, a number nor bytes: '64'"),
        ([x[::2], out, 64, 0.5], "argument 0 is not an array in C order"),
        ([x, out, 64, api.TensorMap(out, (300,))], r"argument 3: a box \(300,\) for an array"),
    ]
    for arguments, said in wrong:
        with pytest.raises(UsageError, match=said):
            run(GOOD, "add", 2, 32, arguments)
    for size in (0, (1, 2, 3, 4), "2", (), 2.0):
        with pytest.raises(UsageError, match="one to three numbers"):
            run(GOOD, "add", size, 32, good)  # type: ignore[arg-type]
    for grid, block in ((5000, 1), (1, 1025)):
        with pytest.raises(UsageError, match="are the most"):
            run(GOOD, "add", grid, block, good)
    with pytest.raises(UsageError, match="no kernel sub; it has add"):
        run(GOOD, "sub", 2, 32, good)
    with pytest.raises(PtxError, match="unknown instruction"):
        run(GOOD.replace("mad.lo", "mad.no"), "add", 2, 32, good)
    with pytest.raises(UsageError, match="cannot read"):
        run(tmp_path / "none.ptx", "add", 2, 32, good)
    (tmp_path / "k.ptx").write_text(GOOD)
    assert not run(tmp_path / "k.ptx", "add", 2, 32, good).faults


def test_a_kernel_is_named_by_a_part_of_its_name() -> None:
    x, out = arrays()
    long = GOOD.replace("entry add(", "entry _Z3addPKfPfif(")
    assert run(long, "add", 2, 32, [x, out, 64, 0.5]).kernel == "_Z3addPKfPfif"


def test_a_part_of_several_names_lists_them() -> None:
    x, out = arrays()
    two = GOOD.replace("entry add(", "entry add_1(") + GOOD[GOOD.index(".visible") :].replace(
        "entry add(", "entry add_2("
    )
    with pytest.raises(UsageError, match="'add' is a part of 2 names: add_1, add_2"):
        run(two, "add", 2, 32, [x, out, 64, 0.5])


def test_numbers_of_numpy_and_of_python() -> None:
    x, out = arrays()
    sizes = np.int64(2), np.array([32, 1, 1])
    result = run(GOOD, "add", *sizes, [x, out, 64, 2])
    assert result[out].tolist() == (x + 2).tolist(), "a whole number for .f32"
    with pytest.raises(UsageError, match=r"argument 2 is 7.0; the parameter is .* \.u32"):
        run(GOOD, "add", 2, 32, [x, out, 7.0, 0.5])
    assert run(GOOD, "add", np.array(2), 32, [x, out, 64, 2], shared=np.int64(4)).faults == ()
    for wrong in ([x, out, np.float32(7), 0.5], [x, out, 64, np.int32(2)]):
        with pytest.raises(UsageError, match=r"of numpy's, [27].*; the parameter is \.[uf]32"):
            run(GOOD, "add", 2, 32, wrong)
    for size in (True, np.array([2.0]), np.array([[1]])):
        with pytest.raises(UsageError, match="one to three numbers"):
            run(GOOD, "add", size, 32, [x, out, 64, 0.5])


def test_shared_memory_has_a_size() -> None:
    for size in (-1, 10**15, 2.5, True):
        with pytest.raises(UsageError, match="at most 232448"):
            run(GOOD, "add", 2, 32, [*arrays(), 64, 0.5], shared=size)  # type: ignore[arg-type]


def test_a_tensor_map_is_read_as_it_was_made() -> None:
    array = np.zeros((3, 40, 64), np.float16)
    found = TensorMap.of(encode_tensor(0x1234567890, array, (1, 8, 64), 128, False))
    assert (found.address, found.bits, found.swizzle) == (0x1234567890, 16, 3)
    assert (found.dims, found.strides, found.box) == ((64, 40, 3), (128, 5120), (64, 8, 1))
    packed = TensorMap.of(encode_tensor(0, np.zeros((8, 32), np.uint8), (8, 64), 0, True))
    assert (packed.bits, packed.dims, packed.box) == (4, (64, 8), (64, 8))
    for one, box, swizzle, said in (
        (np.zeros((4, 4), np.complex128), (4, 4), 0, "complex128 is not known"),
        (array, (8, 64), 0, "a box"),
        (array, (1, 8, 64), 16, "a swizzle of 16 bytes"),
        (np.zeros((4, 7), np.float32), (4, 4), 0, "not multiples of 16"),
    ):
        with pytest.raises(ValueError, match=said):
            encode_tensor(0, one, box, swizzle, False)
