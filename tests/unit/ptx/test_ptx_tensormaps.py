"""Tensor maps that a kernel changes itself: which one a copy reads, and what it needs for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.ptx.api import Result, TensorMap, run
from builder.ptx.program import missing_of
from builder.ptx.source import kernels_of

#: A warp copies ``map`` to shared memory or to ``place``, changes it there, and loads a tile of 8
#: rows of 32 words with it.  %rd1 to %rd4 are ``out``, ``other``, ``place`` and the map to use.
TEXT = """.version 9.0
.target sm_121a
.address_size 64
.visible .entry k(.param .u64 out, .param .align 64 .b8 map[128], .param .u64 other,
 .param .u64 place)
{{
.reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>;
.shared .align 128 .b8 data[1024]; .shared .align 128 .b8 own[128]; .shared .align 16 .b8 bar[16];
mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r6, data; mov.u32 %r7, bar;
mov.u32 %r8, own; cvt.u64.u32 %rd8, %r8; mov.u32 %r9, 0;
ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [other]; ld.param.u64 %rd3, [place];
mov.u64 %rd4, %rd3;
@!%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r7], 1; fence.mbarrier_init.release.cluster;
{fill}
{change}
READY: bar.warp.sync -1;
{publish}
{acquire}
@!%p1 bra LOADED;
mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 1024;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd4, {{%r9,
 %r9}}], [%r7];
LOADED: bar.warp.sync -1;
AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r7], 0; @!%p2 bra AGAIN;
mov.u32 %r20, 0;
ROW: mad.lo.u32 %r21, %r20, 32, %r0; shl.b32 %r22, %r21, 2; add.u32 %r23, %r6, %r22;
ld.shared.u32 %r24, [%r23]; cvt.u64.u32 %rd20, %r22; add.u64 %rd21, %rd1, %rd20;
st.global.u32 [%rd21], %r24; add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 8; @%p3 bra ROW;
ret;
}}
"""
WORDS = range(0, 128, 8)
FILL = "".join(f"ld.param.b64 %rd30, [map+{n}]; st.shared.b64 [%r8+{n}], %rd30;" for n in WORDS)
FILL_GLOBAL = FILL.replace("st.shared.b64 [%r8", "st.global.b64 [%rd3")
#: To ``other``, which has 6 rows of 48 words: the tile's last rows are outside.
CHANGE = """
tensormap.replace.tile.global_address.{0}.b1024.b64 [{1}], %rd2;
mov.u32 %r30, 48; tensormap.replace.tile.global_dim.{0}.b1024.b32 [{1}], 0, %r30;
mov.u32 %r31, 6; tensormap.replace.tile.global_dim.{0}.b1024.b32 [{1}], 1, %r31;
mov.u64 %rd31, 192; tensormap.replace.tile.global_stride.{0}.b1024.b64 [{1}], 0, %rd31;
"""
IN_SHARED, IN_GLOBAL = CHANGE.format("shared::cta", "%rd8"), CHANGE.format("global", "%rd3")
PUBLISH = (
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    " [%rd3], [%r8], 128;"
)
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;"
MAP = np.arange(8 * 32, dtype=np.uint32).reshape(8, 32)
OTHER = 1000 + np.arange(6 * 48, dtype=np.uint32).reshape(6, 48)
CHANGED = np.vstack([OTHER[:, :32], np.zeros((2, 32), np.uint32)])
STALE = "was written, and then used without fence.proxy.tensormap::generic.acquire"


def changed(
    fill: str = FILL, change: str = IN_SHARED, publish: str = PUBLISH, acquire: str = ACQUIRE,
) -> tuple[Result, Any]:  # fmt: skip
    """Run the kernel; the result, and the tile."""
    text = TEXT.format(fill=fill, change=change, publish=publish, acquire=acquire)
    out, place = np.zeros((8, 32), np.uint32), np.full(256, 0x7F, np.uint8)
    result = run(text, "k", 1, 32, [out, TensorMap(MAP, (8, 32)), OTHER, place])
    return result, result[out]


def test_a_map_that_was_changed_in_shared_memory() -> None:
    result, tile = changed()
    result.check()
    assert (tile == CHANGED).all()


def test_a_map_that_was_changed_in_global_memory() -> None:
    result, tile = changed(FILL_GLOBAL, IN_GLOBAL, RELEASE)
    result.check()
    assert (tile == CHANGED).all()


def test_an_acquire_of_no_map_changes_nothing() -> None:
    """Warps of CUTLASS that store no tile acquire address 0."""
    result, tile = changed(acquire=ACQUIRE + ACQUIRE.replace("%rd3", "0"))
    result.check()
    assert (tile == CHANGED).all()


def test_a_map_that_the_host_wrote_needs_no_fence() -> None:
    result, tile = changed("", "", "mov.u64 %rd4, map; cvta.param.u64 %rd4, %rd4;", "")
    result.check()
    assert (tile == MAP).all()


@pytest.mark.parametrize(
    ("fill", "change", "publish", "acquire"),
    [
        (FILL, IN_SHARED, PUBLISH, ""),
        (FILL_GLOBAL, IN_GLOBAL, RELEASE, ""),
        (FILL_GLOBAL, IN_GLOBAL, "", ACQUIRE),
        (FILL, IN_SHARED, PUBLISH, ACQUIRE.replace("[%rd3]", "[%rd3+128]")),
        (FILL, IN_SHARED, PUBLISH + ACQUIRE + "@%p1 " + IN_GLOBAL.split(";")[0].strip() + ";", ""),
    ],
    ids=["no acquire", "none of global", "no release", "of another map", "changed once more"],
)
def test_a_map_without_its_fences(fill: str, change: str, publish: str, acquire: str) -> None:
    change = change.replace("%rd2", "%rd1") if "@%p1" in publish else change
    result, _ = changed(fill, change, publish, acquire)
    assert len(result.faults) == len(result.runs)
    assert all(STALE in fault for fault in result.faults), result.faults


def test_a_map_that_a_warp_changes_while_another_publishes_it() -> None:
    result, _ = changed(publish=PUBLISH + "@%p1 st.shared.b64 [%r8+64], %rd1;" + PUBLISH)
    result.check()
    text = TEXT.format(fill=FILL, change=IN_SHARED, publish=PUBLISH, acquire=ACQUIRE)
    text = text.replace("READY: bar.warp.sync -1;", "READY:")
    out, place = np.zeros((8, 32), np.uint32), np.full(256, 0x7F, np.uint8)
    two = run(text, "k", 1, 64, [out, TensorMap(MAP, (8, 32)), OTHER, place])
    assert any("shared memory" in str(race) for race in two.races)


#: A store with the map, which the warp publishes again.
STORED = f"""{ACQUIRE} @!%p1 bra STORED;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {{%r9, %r9}}], [%r6];
cp.async.bulk.commit_group; WAIT
STORED: bar.warp.sync -1; {PUBLISH} {ACQUIRE} cp.async.bulk.wait_group 0;
"""
IN_USE = "write to a tensor map that a store may still read"


@pytest.mark.parametrize(
    ("wait", "kinds"),
    [
        ("cp.async.bulk.wait_group.read 0;", set()),
        ("cp.async.bulk.wait_group.read 1;", {IN_USE}),
        ("", {IN_USE}),
    ],
)
def test_a_map_is_published_again_after_its_stores(wait: str, kinds: set[str]) -> None:
    """CUTLASS's grouped GEMMs wait before they change the map of their results."""
    result, _ = changed(acquire=STORED.replace("WAIT", wait))
    assert not result.faults
    assert {one.kind for one in result.races if "tensor map" in one.kind} == kinds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"publish": PUBLISH.replace("[%rd3]", "[%rd3+32]")}, "a multiple of 64 bytes"),
        ({"publish": "mov.u32 %r10, %laneid; setp.lt.u32 %p4, %r10, 16; @%p4 " + PUBLISH}, "part"),
        ({"publish": "mad.wide.u32 %rd3, %r0, 16, %rd3;" + PUBLISH}, "different addresses"),
        ({"publish": PUBLISH + "add.u64 %rd4, %rd3, 1024;"}, "outside every buffer"),
    ],
)
def test_maps_that_cannot_be_used(change: dict[str, str], words: str) -> None:
    change.setdefault("acquire", "")
    if "32]" in change["publish"]:
        change["publish"] += "add.u64 %rd4, %rd3, 32;"
    result, _ = changed(**change)
    assert all(words in fault for fault in result.faults), result.faults
    assert result.faults


@pytest.mark.parametrize(
    "instruction",
    [
        "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r8], 1;",
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r8], 5, %r9;",
        "tensormap.replace.tile.global_address.b1024.b64 [%rd3], %rd2;",
        PUBLISH.replace("128;", "64;"),
        ACQUIRE.replace(", 128", ""),
    ],
)
def test_forms_that_are_refused(instruction: str) -> None:
    text = TEXT.format(fill=instruction, change="", publish="", acquire="")
    (kernel,) = kernels_of(text).values()
    assert len(missing_of(kernel)) == 1
