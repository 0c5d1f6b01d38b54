"""The table of instructions that run: each form of the PTX ISA, tried on the decoder.

A row is a form as the PTX ISA, "Instruction Set", writes it, and its operands.  Words in braces are
alternatives, and an empty one is an optional word.  Each operand is a letter: ``p`` a predicate,
``h r l`` a register of 16, 32 and 64 bits, ``T`` one of the last type, ``D`` one of the type
before; ``g`` and ``s`` an address in global and in shared memory, ``t`` a tensor's, ``i`` a number,
``_`` nothing, ``-`` no register; ``4r`` is a vector and ``r|p`` a pair.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.common.document import Document, Part, Text
from builder.errors import UsageError
from builder.ptx.launchfile import read_text
from builder.ptx.machine import PtxError
from builder.ptx.program import missing_of
from builder.ptx.source import kernels_of, module_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_ROUND = "{.rn|.rz|.rm|.rp}"
_WORDS = "{.u16|.s16|.u32|.s32|.u64|.s64}"
_COMPARED = "{.eq|.ne|.lt|.le|.gt|.ge}"
_UNORDERED = "{.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan}"
_MEMORY = "{.b8|.b16|.b32|.b64|.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64|.f32|.f64}"
_SCOPE = "{.cta|.cluster|.gpu|.sys}"

#: By kind, one form and its operands in a line.
FORMS: dict[str, str] = {
    "integers": f"""
        {{add|sub}}{_WORDS} T T T
        {{add|sub}}.sat.s32 T T T
        {{add|sub|min|max}}{{|.sat}}{{.u16x2|.s16x2}} r r r
        {{add|sub|addc|subc}}.cc{{.u32|.s32|.u64|.s64}} T T T
        {{addc|subc}}{{.u32|.s32|.u64|.s64}} T T T
        mul.lo{_WORDS} T T T
        mul.hi{_WORDS} T T T
        mul.wide{{.u16|.s16}} r T T
        mul.wide{{.u32|.s32}} l T T
        mad.lo{_WORDS} T T T T
        mad.hi{_WORDS} T T T T
        mad.hi.sat.s32 T T T T
        mad.wide{{.u16|.s16}} r T T r
        mad.wide{{.u32|.s32}} l T T l
        mad{{.lo|.hi}}{{|.cc}}{{.u32|.s32|.u64|.s64}} T T T T
        madc{{.lo|.hi}}{{|.cc}}{{.u32|.s32|.u64|.s64}} T T T T
        mul24{{.lo|.hi}}{{.u32|.s32}} T T T
        mad24{{.lo|.hi}}{{.u32|.s32}} T T T T
        {{div|rem|min|max}}{_WORDS} T T T
        {{abs|neg}}{{.s16|.s32|.s64}} T T
        sad{_WORDS} T T T T
        {{popc|clz}}{{.b32|.b64}} r T
        brev{{.b32|.b64}} T T
        bfind{{|.shiftamt}}{{.u32|.s32|.u64|.s64}} r T
        bfe{{.u32|.s32|.u64|.s64}} T T r r
        bfi{{.b32|.b64}} T T T r r
        bmsk{{.clamp|.wrap}}.b32 r r r
        szext{{.clamp|.wrap}}{{.u32|.s32}} T T r
        fns.b32 r r r r
        dp4a{{.u32|.s32}}{{.u32|.s32}} r r r r
        dp2a{{.lo|.hi}}{{.u32|.s32}}{{.u32|.s32}} r r r r
        {{and|or|xor}}{{.pred|.b16|.b32|.b64}} T T T
        not{{.pred|.b16|.b32|.b64}} T T
        cnot{{.b16|.b32|.b64}} T T
        lop3.b32 r r r r i
        lop3{{.and|.or}}.b32 r|p r r r i p
        shf{{.l|.r}}{{.wrap|.clamp}}.b32 r r r r
        shl{{.b16|.b32|.b64}} T T r
        shr{{.b16|.b32|.b64|.u16|.s16|.u32|.s32|.u64|.s64}} T T r
        prmt.b32{{|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16}} r r r r
        {{vadd2|vsub2|vavrg2|vabsdiff2|vmin2|vmax2|vadd4|vsub4|vavrg4|vabsdiff4|vmin4|vmax4}}"""
    """{.u32|.s32}{.u32|.s32}{.u32|.s32}{|.sat|.add} r r r r
        {vadd|vsub|vabsdiff|vmin|vmax}{.u32|.s32}{.u32|.s32}{.u32|.s32}{|.sat} r r r
        {vshl|vshr}{.u32|.s32}.u32.u32{.clamp|.wrap} r r r
        vmad{.u32|.s32}{.u32|.s32}{.u32|.s32} r r r r
        {vset|vset2|vset4}{.u32|.s32}{.u32|.s32}.eq r r r r""",
    "floating point": f"""
        {{add|sub|mul}}{{|{_ROUND[1:-1]}}}{{|.ftz}}{{|.sat}}.f32 T T T
        {{add|sub|mul}}{{|{_ROUND[1:-1]}}}.f64 T T T
        {{add|sub|mul}}{{|{_ROUND[1:-1]}}}{{|.ftz}}.f32x2 l l l
        {{add|sub|mul}}{{|.rn}}{{|.ftz}}{{|.sat}}{{.f16|.f16x2}} T T T
        {{add|sub|mul}}{{|.rn}}{{.bf16|.bf16x2}} T T T
        {{add|sub}}{{|{_ROUND[1:-1]}}}{{|.sat}}.f32{{.f16|.bf16}} r h r
        fma{_ROUND}{{|.ftz}}{{|.sat}}.f32 T T T T
        fma{_ROUND}.f64 T T T T
        fma{_ROUND}{{|.ftz}}.f32x2 l l l l
        fma.rn{{|.ftz}}{{|.sat|.relu}}{{.f16|.f16x2}} T T T T
        fma.rn{{|.relu}}{{.bf16|.bf16x2}} T T T T
        fma.rn.oob{{|.relu}}{{.f16|.f16x2|.bf16|.bf16x2}} T T T T
        fma{{|{_ROUND[1:-1]}}}{{|.sat}}.f32{{.f16|.bf16}} r h h r
        mad{_ROUND}{{.f32|.f64}} T T T T
        div{{.approx|.full}}{{|.ftz}}.f32 T T T
        div{_ROUND}{{|.ftz}}.f32 T T T
        div{_ROUND}.f64 T T T
        {{rcp|sqrt}}{{.approx|.rn|.rz|.rm|.rp}}{{|.ftz}}.f32 T T
        {{rcp|sqrt}}{_ROUND}.f64 T T
        {{rcp|rsqrt}}.approx.ftz.f64 T T
        rsqrt.approx{{|.ftz}}.f32 T T
        rsqrt.approx.f64 T T
        {{sin|cos|lg2|ex2}}.approx{{|.ftz}}.f32 T T
        ex2.approx{{.f16|.f16x2|.ftz.bf16|.ftz.bf16x2}} T T
        tanh.approx{{.f32|.f16|.f16x2|.bf16|.bf16x2}} T T
        {{abs|neg}}{{|.ftz}}{{.f32|.f16|.f16x2}} T T
        {{abs|neg}}{{.f64|.bf16|.bf16x2}} T T
        {{min|max}}{{|.ftz}}{{|.NaN}}{{|.xorsign.abs}}{{.f32|.f16|.f16x2}} T T T
        {{min|max}}{{|.NaN}}{{|.xorsign.abs}}{{.bf16|.bf16x2}} T T T
        {{min|max}}{{|.ftz}}{{|.NaN}}.f32 T T T T
        {{min|max}}{{|.ftz}}{{|.NaN}}.abs.f32 T T T T
        {{min|max}}.f64 T T T
        copysign{{.f32|.f64}} T T T
        testp{{.finite|.infinite|.number|.notanumber|.normal|.subnormal}}{{.f32|.f64}} p T""",
    "comparison and selection": f"""
        setp{_COMPARED}{{.b16|.b32|.b64|.u16|.s16|.u32|.s32|.u64|.s64}} p T T
        setp{{.lo|.ls|.hi|.hs}}{{.u16|.u32|.u64}} p T T
        setp{_COMPARED}{{.and|.or|.xor}}{{.s32|.u32|.f32}} p|p T T p
        setp{_UNORDERED}{{|.ftz}}{{.f32|.f16}} p T T
        setp{_UNORDERED}{{.f64|.bf16}} p T T
        setp{_COMPARED}{{|.ftz}}.f16x2 p|p r r
        setp{_COMPARED}.bf16x2 p|p r r
        set{_COMPARED}{{.u32|.s32|.f32}}{{.s32|.u32|.f32}} r T T
        set{_COMPARED}{{|.ftz}}{{.f16x2.f16x2|.bf16x2.bf16x2}} r r r
        set{_COMPARED}{{.f16|.u16|.s16|.u32|.s32}}.f16 T T T
        set{_COMPARED}{{.bf16|.u16|.s16|.u32|.s32}}.bf16 T T T
        selp{{.b16|.b32|.b64|.u16|.s16|.u32|.s32|.u64|.s64|.f32|.f64}} T T T p
        slct{{.b32|.u32|.s32|.f32}}{{.s32|.f32}} r r r r""",
    "conversion": f"""
        cvt{{|.sat}}{{.u8|.s8|.u16|.s16}}{{.u8|.s8|.u16|.s16}} h h
        cvt{{|.sat}}{{.u32|.s32|.u64|.s64}}{{.u8|.s8|.u16|.s16|.u32|.s32|.u64|.s64}} D T
        cvt{_ROUND}{{.f16|.bf16|.f32|.f64}}{{.u8|.s8|.u16|.s16|.u32|.s32|.u64|.s64}} D T
        cvt{{.rni|.rzi|.rmi|.rpi}}{{|.ftz}}{{|.sat}}{_WORDS}{{.f16|.f32}} D T
        cvt{{.rni|.rzi|.rmi|.rpi}}{{|.sat}}{{.u16|.s16|.u32|.s32|.u64|.s64}}{{.bf16|.f64}} D T
        cvt{{.rni|.rzi|.rmi|.rpi}}{{|.ftz}}{{|.sat}}.f32.f32 r r
        cvt{{.rni|.rzi|.rmi|.rpi}}{{|.sat}}{{.f64.f64|.f16.f16}} D T
        cvt{{|.ftz}}{{|.sat}}{{.f32.f16|.f64.f32|.f32.f32}} D T
        cvt{{.f32.bf16|.f64.f16|.f64.bf16}} D T
        cvt{_ROUND}{{|.ftz}}{{|.sat}}.f32.f64 r l
        cvt{{.rn|.rz}}{{|.relu}}{{.f16|.bf16}}.f32 h r
        cvt{{.rn|.rz}}{{.f16|.bf16}}.f64 h l
        cvt{{.rn|.rz}}{{|.relu}}{{|.satfinite}}{{.f16x2|.bf16x2}}.f32 r r r
        cvt.rs{{|.relu}}{{|.satfinite}}{{.f16x2|.bf16x2}}.f32 r r r r
        cvt{{.rna|.rn|.rz}}{{|.satfinite}}.tf32.f32 r r
        cvt{{.rn|.rz}}.relu.tf32.f32 r r
        cvt.rn.satfinite{{|.relu}}{{.e4m3x2|.e5m2x2}}.f32 h r r
        cvt.rn.satfinite{{|.relu}}{{.e4m3x2|.e5m2x2}}.f16x2 h r
        cvt.rn{{|.relu}}.f16x2{{.e4m3x2|.e5m2x2}} r h
        cvt.rn.bf16x2{{.e4m3x2|.e5m2x2}} r h
        cvt.rn.satfinite{{|.relu}}.e2m1x2.f32 h r r
        cvt.rn{{|.relu}}{{.f16x2|.bf16x2}}.e2m1x2 r h
        cvt.rn.satfinite{{|.relu}}{{.e2m3x2|.e3m2x2}}.f32 h r r
        cvt.rn{{|.relu}}.f16x2{{.e2m3x2|.e3m2x2}} r h
        cvt{{.rz|.rp}}{{|.satfinite}}.ue8m0x2.f32 h r r
        cvt{{.rz|.rp}}{{|.satfinite}}.ue8m0x2.bf16x2 h r
        cvt.rn.bf16x2.ue8m0x2 r h
        cvt.pack.sat{{.u8|.s8}}.s32.b32 r r r r
        cvt.pack.sat{{.u16|.s16}}.s32 r r r""",
    "moving data": f"""
        mov{{.pred|.b16|.b32|.b64|.u16|.s16|.u32|.s32|.u64|.s64|.f32|.f64}} T T
        mov.b32 r 2h
        mov.b64 l 2r
        mov.b64 l 4h
        mov.b32 2h r
        mov.b64 2r l
        mov.b64 4h l
        mov.b128 q q
        mov.b128 q 2l
        mov.b128 2l q
        ld.shared.b128 q s
        st.shared.b128 s q
        ld{{|.global|.shared|.local|.const}}{_MEMORY} T a
        ld{{|.global|.shared|.local|.const}}.v2{_MEMORY} 2T a
        ld{{|.global|.shared|.local|.const}}.v4{{.b8|.b16|.b32|.u32|.f32}} 4T a
        ld.global{{.v4.b64|.v4.f64}} 4l g
        ld.global{{.v8.b32|.v8.f32}} 8r g
        ld{{.volatile|.relaxed.cta|.relaxed.gpu|.relaxed.sys|.acquire.cta|.acquire.gpu|.acquire.sys}}"""
    """{|.global|.shared}{.b8|.u16|.u32|.b32|.b64|.f32} T a
        ld.global{|.ca|.cg|.cs|.lu|.cv|.nc}{|.L1::no_allocate|.L1::evict_last}{|.L2::128B}.b32 r g
        ld.global.L2::cache_hint.b32 r g l
        ld{|.relaxed.cluster|.acquire.cluster}.shared::cluster{.b32|.b64} T s
        ld.shared::cluster.v4.b32 4T s
        ldu.global.b32 r g
        st{|.global|.shared|.local}"""
    f"""{_MEMORY} a T
        st{{|.global|.shared|.local}}.v2{_MEMORY} a 2T
        st{{|.global|.shared|.local}}.v4{{.b8|.b16|.b32|.u32|.f32}} a 4T
        st.global{{.v4.b64|.v4.f64}} g 4l
        st.global{{.v8.b32|.v8.f32}} g 8r
        st{{.volatile|.relaxed.cta|.relaxed.gpu|.relaxed.sys|.release.cta|.release.gpu|.release.sys}}"""
    """{|.global|.shared}{.b8|.u16|.u32|.b32|.b64|.f32} a T
        st.global{|.wb|.cg|.cs|.wt}{|.L1::no_allocate}.b32 g r
        st.global.L2::cache_hint.b32 g r l
        st{|.relaxed.cluster|.release.cluster}.shared::cluster{.b32|.b64} s T
        st.shared::cluster.v4.b32 s 4T
        st.async{|.weak}.shared::cluster.mbarrier::complete_tx::bytes{.b32|.b64|.f32|.s64} s T s
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v2{.b32|.b64} s 2T s
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 s 4T s
        cvta{|.to}{.global|.shared|.local|.const|.param}.u64 l l
        isspacep{.global|.const|.local|.shared|.shared::cta|.shared::cluster|.param} p l
        mapa.shared::cluster{.u32|.u64} T T r
        mapa.u64 l l r
        getctarank.shared::cluster.u32 r r
        getctarank.u64 r l
        prefetch{.global|.local}{.L1|.L2} g
        prefetch.tensormap g
        prefetchu.L1 g
        applypriority.global.L2::evict_normal g i
        discard.global.L2 g i
        createpolicy.fractional{.L2::evict_first|.L2::evict_last}.b64 l
        multimem.ld_reduce.global.add.f32 r g
        tensormap.replace.tile.global_address{.global|.shared::cta}.b1024.b64 a l
        tensormap.replace.tile.global_dim{.global|.shared::cta}.b1024.b32 a i r
        tensormap.replace.tile.global_stride{.global|.shared::cta}.b1024.b64 a i l
        tensormap.replace.tile{.rank|.elemtype|.swizzle_mode}.shared::cta.b1024.b32 s i
        tensormap.replace.tile{.box_dim|.element_stride}.shared::cta.b1024.b32 s i r
        tensormap.cp_fenceproxy.global.shared::cta"""
    """.tensormap::generic.release.gpu.sync.aligned g s 128
        alloca.u64 l l
        {tex|tld4|suld|sust|sured|txq|suq} r r""",
    "atomics": f"""
        atom{{|.relaxed|.acquire|.release|.acq_rel}}{{|{_SCOPE[1:-1]}}}{{|.global|.shared}}.add"""
    """{.u32|.s32|.u64|.f32|.f64|.bf16|.f16} T a T
        atom{|.global|.shared}.add.noftz{.f16|.f16x2|.bf16|.bf16x2} T a T
        atom{|.global|.shared}{.min|.max}{.u32|.s32|.u64|.s64} T a T
        atom{|.global|.shared}{.and|.or|.xor|.exch}{.b32|.b64} T a T
        atom{|.global|.shared}{.inc|.dec}.u32 T a T
        atom{|.global|.shared}.cas{.b16|.b32|.b64} T a T T
        atom{|.global|.shared}{.exch|.cas}.b128 q a q q
        atom.global{.v2|.v4}.add.f32 4r g 4r
        red{|.relaxed|.release}{|.cta|.gpu|.sys}{|.global|.shared}.add{.u32|.s32|.u64|.f32|.f64} a T
        red{|.global|.shared}.add.noftz{.f16|.f16x2|.bf16|.bf16x2} a T
        red{|.global|.shared}{.min|.max}{.u32|.s32|.u64|.s64} a T
        red{|.global|.shared}{.and|.or|.xor}{.b32|.b64} a T
        red{|.global|.shared}{.inc|.dec}.u32 a T
        red.global.v2.f32.add g 2r
        red.global.add.noftz.v4.bf16x2{|.L2::cache_hint} g 4r
        atom{|.relaxed|.release}.cluster.shared::cluster.add{.u32|.s32|.u64} T s T
        red{|.relaxed|.release}.cluster.shared::cluster.add{.u32|.s32|.u64} s T
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"""
    """{.add.u32|.add.s32|.add.u64|.min.u32|.max.s32|.inc.u32|.dec.u32|.and.b32|.or.b32|.xor.b32}"""
    """ s T s
        multimem.red.global.add.f32 g r""",
    "asynchronous copies": """
        cp.async.ca.shared.global s g 4
        cp.async.ca.shared.global{|.L2::64B|.L2::128B} s g 16
        cp.async.cg.shared.global{|.L2::64B|.L2::128B|.L2::256B} s g 16
        cp.async.cg.shared.global s g 16 r
        cp.async.cg.shared.global.L2::cache_hint s g 16 l
        cp.async.commit_group
        cp.async.wait_group i
        cp.async.wait_all
        cp.async.mbarrier.arrive{|.noinc}{|.shared}.b64 s
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes{|.L2::cache_hint} s g r s
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes s g r s
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"""
    """.multicast::cluster s g r s h
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes s s r s
        cp.async.bulk.global.shared::cta.bulk_group{|.L2::cache_hint} g s r
        cp.async.bulk.prefetch.L2.global g r
        cp.async.bulk.commit_group
        cp.async.bulk.wait_group{|.read} i
        cp.async.bulk.tensor{.1d|.2d|.3d|.4d|.5d}{.shared::cta|.shared::cluster}.global"""
    """{|.tile}.mbarrier::complete_tx::bytes{|.L2::cache_hint} s t s
        cp.async.bulk.tensor{.1d|.2d|.3d|.4d|.5d}.global.shared::cta{|.tile}.bulk_group"""
    """{|.L2::cache_hint} t s
        cp.async.bulk.tensor{.1d|.2d|.3d|.4d|.5d}.shared::cluster.global"""
    """.mbarrier::complete_tx::bytes.multicast::cluster{|.L2::cache_hint} s t s h
        cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes s t s
        cp.async.bulk.prefetch.tensor.2d.L2.global t
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 g s r
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group t s""",
    "barriers and fences": f"""
        {{bar|barrier}}.sync i
        {{bar|barrier}}.sync i r
        {{bar|barrier}}.arrive i r
        barrier{{.sync|.arrive}}.aligned i r
        {{bar|barrier}}.red.popc.u32 r i p
        {{bar|barrier}}.red{{.and|.or}}.pred p i p
        bar.warp.sync r
        barrier.cluster.arrive{{|.release|.relaxed}}{{|.aligned}} _
        barrier.cluster.wait{{|.acquire}}{{|.aligned}} _
        membar{{.cta|.gl|.sys}} _
        fence{{.sc|.acq_rel}}{_SCOPE} _
        fence.proxy.async{{|.global|.shared::cta}} _
        fence.proxy.alias _
        fence.mbarrier_init.release.cluster _
        fence.proxy.tensormap::generic.release.gpu _
        fence.proxy.tensormap::generic.acquire.gpu g 128
        mbarrier.init{{|.shared}}.b64 s r
        mbarrier.inval{{|.shared}}.b64 s
        mbarrier.arrive{{|.shared}}.b64 l s
        mbarrier.arrive.shared.b64 l s r
        mbarrier.arrive.expect_tx{{|.shared}}.b64 l s r
        mbarrier{{.arrive|.arrive_drop}}.noComplete{{|.shared}}.b64 l s r
        mbarrier.arrive_drop{{|.expect_tx}}{{|.shared}}.b64 l s r
        mbarrier.arrive{{|.release.cluster|.relaxed.cluster}}.shared::cluster.b64 - s
        mbarrier.arrive_drop{{|.release.cluster}}.shared::cluster.b64 - s
        mbarrier{{.expect_tx|.complete_tx}}{{|.relaxed.cta}}.shared.b64 s r
        mbarrier{{.expect_tx|.complete_tx}}.relaxed.cluster.shared::cluster.b64 s r
        mbarrier{{.test_wait|.try_wait}}.parity{{|.acquire.cta}}.shared.b64 p s r
        mbarrier{{.test_wait|.try_wait}}.shared.b64 p s l
        mbarrier.pending_count.b64 r l
        clusterlaunchcontrol.try_cancel.async{{|.shared::cta}}.mbarrier::complete_tx::bytes"""
    """{|.multicast::cluster::all}.b128 s s
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p q
        clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 4r q
        clusterlaunchcontrol.query_cancel{.get_first_ctaid::x|.get_first_ctaid::y"""
    """|.get_first_ctaid::z}.b32.b128 r q""",
    "lanes of a warp": """
        shfl.sync{.idx|.up|.down|.bfly}.b32 r r r r r
        shfl.sync{.idx|.up|.down|.bfly}.b32 r|p r r r r
        vote.sync{.all|.any|.uni}.pred p p r
        vote.sync.ballot.b32 r p r
        match.any.sync{.b32|.b64} r T r
        match.all.sync{.b32|.b64} r|p T r
        redux.sync{.add|.min|.max}{.u32|.s32} r r r
        redux.sync{.and|.or|.xor}.b32 r r r
        redux.sync{.min|.max}{|.abs}{|.NaN}.f32 r r r
        elect.sync r|p r
        activemask.b32 r
        griddepcontrol{.wait|.launch_dependents} _
        setmaxnreg{.inc|.dec}.sync.aligned.u32 i
        nanosleep.u32 r
        {exit|trap|brkpt} _
        pmevent i""",
    "matrices": """
        ldmatrix.sync.aligned.m8n8.x1{|.trans}.shared.b16 1r s
        ldmatrix.sync.aligned.m8n8.x2{|.trans}.shared.b16 2r s
        ldmatrix.sync.aligned.m8n8.x4{|.trans}.shared.b16 4r s
        ldmatrix.sync.aligned.m8n16.x1.shared.b8x16{.b4x16_p64|.b6x16_p32} 1r s
        ldmatrix.sync.aligned.m8n16.x2.shared.b8x16{.b4x16_p64|.b6x16_p32} 2r s
        ldmatrix.sync.aligned.m8n16.x4.shared.b8x16{.b4x16_p64|.b6x16_p32} 4r s
        ldmatrix.sync.aligned.m16n16.x1.trans.shared{.b8|.b8x16.b4x16_p64|.b8x16.b6x16_p32} 2r s
        ldmatrix.sync.aligned.m16n16.x2.trans.shared{.b8|.b8x16.b4x16_p64|.b8x16.b6x16_p32} 4r s
        stmatrix.sync.aligned.m8n8.x1{|.trans}.shared.b16 s 1r
        stmatrix.sync.aligned.m8n8.x2{|.trans}.shared.b16 s 2r
        stmatrix.sync.aligned.m8n8.x4{|.trans}.shared.b16 s 4r
        movmatrix.sync.aligned.m8n8.trans.b16 r r
        mma.sync.aligned.m16n8k8.row.col.f32{.f16.f16|.bf16.bf16}.f32 4r 2r 1r 4r
        mma.sync.aligned.m16n8k16.row.col.f32{.f16.f16|.bf16.bf16}.f32 4r 4r 2r 4r
        mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 2r 4r 2r 2r
        mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 2r 2r 1r 2r
        mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 4r 2r 1r 4r
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 4r 4r 2r 4r
        mma.sync.aligned.m16n8k32.row.col.f32{.e4m3|.e5m2}{.e4m3|.e5m2}.f32 4r 4r 2r 4r
        mma.sync.aligned.m16n8k32.row.col.f16{.e4m3|.e5m2}{.e4m3|.e5m2}.f16 2r 4r 2r 2r
        mma.sync.aligned.m16n8k16.row.col{|.satfinite}.s32{.s8|.u8}{.s8|.u8}.s32 4r 2r 1r 4r
        mma.sync.aligned.m16n8k16.row.col.s32{.s8|.u8}{.s8|.u8}.s32.satfinite 4r 2r 1r 4r
        mma.sync.aligned.m16n8k32.row.col{|.satfinite}.s32{.s8|.u8}{.s8|.u8}.s32 4r 4r 2r 4r
        mma.sync.aligned.m16n8k32.row.col.s32{.s8|.u8}{.s8|.u8}.s32.satfinite 4r 4r 2r 4r
        mma.sync.aligned.m16n8k64.row.col{|.satfinite}.s32{.s4|.u4}{.s4|.u4}.s32 4r 4r 2r 4r
        mma.sync.aligned.m16n8k64.row.col.s32{.s4|.u4}{.s4|.u4}.s32.satfinite 4r 4r 2r 4r
        mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32{.xor|.and}.popc 4r 4r 2r 4r
        mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 2l 1l 1l 2l
        mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 4l 4l 2l 4l
        mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 4l 8l 4l 4l
        mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32"""
    """{.e4m3|.e5m2|.e2m3|.e3m2|.e2m1}{.e4m3|.e5m2|.e2m3|.e3m2|.e2m1}.f32 4r 4r 2r 4r
        mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"""
    """.f32.e2m1.e2m1.f32.ue4m3 4r 4r 2r 4r r 2h r 2h
        mma.sync.aligned.kind::mxf4{|nvf4}.block_scale.scale_vec::2X.m16n8k64.row.col"""
    """.f32.e2m1.e2m1.f32.ue8m0 4r 4r 2r 4r r 2h r 2h
        mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32"""
    """{.e4m3|.e5m2|.e2m1}{.e4m3|.e5m2|.e2m1}.f32.ue8m0 4r 4r 2r 4r r 2h r 2h
        mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 4r 4r 4r 4r r i
        wmma.load{.a|.b}.sync.aligned{.row|.col}{.m16n16k16|.m8n32k16|.m32n8k16}{.shared|.global}"""
    """{.f16|.bf16} 8r a r
        wmma.load.c.sync.aligned{.row|.col}.m16n16k16{.shared|.global}{.f32|.s32} 8r a r
        wmma.store.d.sync.aligned{.row|.col}.m16n16k16{.shared|.global}{.f32|.s32} a 8r r
        wmma.mma.sync.aligned{.row|.col}{.row|.col}.m16n16k16.f32.f32 8r 8r 8r 8r
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 4r l l
        tcgen05.mma.cta_group::1.kind::f16 r l l r""",
}

_WIDTH = {
    "8": "h",
    "16": "h",
    "32": "r",
    "64": "l",
    "128": "q",
    "16x2": "r",
    "32x2": "l",
    "pred": "p",
}
_TYPE = re.compile(r"\.(?:pred|(?:bf|[busf])(\d+(?:x2)?)|tf32)(?=\.|$)")
_HEAD = """.version 9.1
.target sm_121a
.address_size 64
.visible .entry k()
{
.reg .pred %p<40>; .reg .b16 %h<40>; .reg .b32 %r<40>; .reg .b64 %l<40>; .reg .b128 %q<40>;
.shared .align 16 .b8 place[64];
"""


class Form(Part, frozen=True):
    """A form of an instruction, and which of its alternatives the executor has."""

    kind: Text
    form: Annotated[Text, Meta(description="words in braces are alternatives")]
    known: Annotated[tuple[Text, ...], Meta(description="the instructions that run")]
    unknown: Annotated[tuple[Text, ...], Meta(description="those that do not")]


class Missing(Part, frozen=True):
    """An instruction of a kernel that the executor lacks."""

    kernel: Text
    line: Annotated[int, Meta(ge=1)]
    text: Text
    why: Text


class Instructions(Document, frozen=True):
    """The instructions that the executor has, or those of a file that it lacks."""

    forms: Annotated[tuple[Form, ...], Meta(description="without a file: the table")]
    kernels: Annotated[tuple[Text, ...], Meta(description="of the file")]
    missing: Annotated[tuple[Missing, ...], Meta(description="of these kernels")]


def _expanded(form: str) -> Iterator[str]:
    parts = re.split(r"\{([^}]*)\}", form)
    for words in product(*(one.split("|") if n % 2 else [one] for n, one in enumerate(parts))):
        yield "".join(words)


def _register(kind: str, number: int) -> str:
    return f"%{kind}{number}"


def _operand(letter: str, name: str, number: int) -> str:
    """The text of an operand of an instruction."""
    types = [_WIDTH.get(match[1] or "32", "q") if match[0] != ".pred" else "p"
             for match in _TYPE.finditer(name)] or ["r"]  # fmt: skip
    if letter.isdigit():
        return letter
    if letter[0].isdigit():
        count = int(letter[0])
        each = (_operand(letter[1:], name, number + n) for n in range(count))
        return f"{{{', '.join(each)}}}"
    if "|" in letter:
        first, second = letter.split("|")
        return f"{_operand(first, name, number)}|{_operand(second, name, number + 1)}"
    rank = re.search(r"\.([1-5])d\b", name)
    coordinates = ", ".join(_register("r", n + 1) for n in range(int(rank[1]) if rank else 1))
    space = "s" if re.search(r"\.shared\b", name) else "g"
    fixed = {
        "i": "0", "-": "_", "g": "[%l1]", "s": "[%r1]", "t": f"[%l1, {{{coordinates}}}]",
        "a": "[%r1]" if space == "s" else "[%l1]",
    }  # fmt: skip
    return fixed.get(letter) or _register(
        {"T": types[-1], "D": types[-2] if len(types) > 1 else types[-1]}.get(letter, letter),
        number,
    )


def instruction(name: str, operands: str) -> str:
    """The text of an instruction."""
    letters = [one for one in operands.split() if one != "_"]
    operand_list = ", ".join(_operand(one, name, 4 * n + 1) for n, one in enumerate(letters))
    return f"{name} {operand_list};" if operand_list else f"{name};"


def _known(texts: Sequence[str]) -> list[bool]:
    """Whether the decoder knows each instruction."""
    try:
        (kernel,) = kernels_of("\n".join([_HEAD, *texts, "ret;\n}\n"])).values()
    except PtxError:  # one of them cannot even be read
        return [False] if len(texts) < 2 else [_known([one])[0] for one in texts]
    missing = missing_of(kernel)
    return [place not in missing for place in range(len(texts))]


def table() -> tuple[Form, ...]:
    """Each form of the table, tried on the decoder."""
    return tuple(_tried(kind, line) for kind, lines in FORMS.items() for line in _lines(lines))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _tried(kind: str, line: str) -> Form:
    form, _, operands = line.partition(" ")
    names = list(_expanded(form))
    known = _known([instruction(name, operands) for name in names])
    by_support: dict[bool, list[str]] = {True: [], False: []}
    for name, there in zip(names, known, strict=True):
        by_support[there].append(name)
    return Form(kind, form, tuple(by_support[True]), tuple(by_support[False]))


def missing_in(path: Path) -> Instructions:
    """All instructions of the kernels of a file that the executor lacks, each name once.

    Raises:
        UsageError: the PTX cannot be read.
    """
    try:
        text = read_text(path)
        module = module_of(text)
        kernels = {name: module.kernel(name) for name in module.entries}
    except PtxError as error:
        raise UsageError(f"{path}: {error}") from None
    if not kernels:
        raise UsageError(f"{path}: no kernel (.entry)")
    lines = text.split("\n")
    missing: dict[tuple[str, str], Missing] = {}
    for name, kernel in kernels.items():
        for lacking in missing_of(kernel).values():
            one = Missing(name, lacking.line, lines[lacking.line - 1].strip(), lacking.what)
            missing.setdefault((name, lacking.what), one)
    return Instructions((), tuple(kernels), tuple(missing.values()))


def page() -> str:
    """The page of the documentation with the table."""
    forms = table()
    count, lacking = sum(len(f.known) for f in forms), sum(len(f.unknown) for f in forms)
    parts = [_BEGIN.format(count=count, lacking=lacking)]
    for kind in dict.fromkeys(form.kind for form in forms):
        parts.append(f"\n## {kind.capitalize()}\n\n| form | runs | not there |\n|---|---|---|\n")
        parts += [_row(form) for form in forms if form.kind == kind]
    return "".join(parts)


#: Of a form, the instructions that the page names.
_NAMED = 6


def _row(form: Form) -> str:
    total = len(form.known) + len(form.unknown)
    share = "all" if not form.unknown else f"{len(form.known)} of {total}" if form.known else "no"
    examples = [f"`{name}`" for name in form.unknown[:_NAMED]] if form.known else []
    more = len(form.unknown) - len(examples)
    lacking = ", ".join(examples) + (f" and {more} more" if examples and more else "")
    escaped = form.form.replace("|", "\\|")
    return f"| `{escaped}` | {share} | {lacking} |\n"


_BEGIN = """# Instructions that run

Written by `python -m tests.generate`: each form below was tried on the executor's decoder.
{count} instructions run, and {lacking} of these forms do not; [ptx.md](ptx.md#what-runs) says what
is behind them. Words in braces are alternatives, and an empty one is a word that may be absent.
Branches, calls, `ret`, labels, guards and special registers are there too.

`spark-build ptx instructions` prints the same table; `spark-build ptx instructions kernel.ptx` all
instructions of a file that do not run, with their lines.
"""
