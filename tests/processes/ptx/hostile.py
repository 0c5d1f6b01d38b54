"""Kernels and launches that try to reach, fill or stop the host: each runs in a process of its own.

``python -m tests.processes.ptx.hostile`` writes one line of JSON for each: how its process ended,
the exit code of the command, and what it wrote.  A process has few gigabytes and little time, so
that one that wants more is seen at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

HEAD = """.version 8.8
.target sm_121a
.address_size 64
"""
REGISTERS = """.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.reg .f32 %f<9>; .reg .b128 %q<3>; .shared .align 16 .b8 place[256]; .local .align 16 .b8 own[64];
ld.param.u64 %rd1, [out]; mov.u64 %rd2, 0x7ffffffffffff000; mov.u32 %r1, %tid.x;
"""
LAUNCH: dict[str, Any] = {
    "schema": 1,
    "grid": [1, 1, 1],
    "block": [32, 1, 1],
    "parameters": [{"array": "out"}],
    "memory": [{"name": "out", "type": "u32", "shape": [64], "fill": 0, "writable": True}],
}

#: The body of a kernel, whose only parameter is ``out``.
BODIES = {
    "a parameter before the first": "ld.param.u32 %r2, [out-4096]; st.global.u32 [%rd1], %r2;",
    "a parameter behind the last": "ld.param.u64 %rd3, [out+4096];",
    "a parameter behind all numbers": "ld.param.u32 %r2, [out+0xffffffffffffffff];",
    "a vector of parameters": "ld.param.v4.u32 {%r2, %r3}, [out];",
    "a parameter into a predicate": "ld.param.u32 %p1, [out];",
    "an offset at the end of all numbers": "ld.global.u32 %r2, [%rd1+0x7fffffffffffffff];",
    "a register at the end of all numbers": "mov.u64 %rd3, 0x7ffffffffffffffc;"
    " ld.global.u32 %r2, [%rd3];",
    "before all memory": "mov.u64 %rd3, 0x8000000000000000; st.global.u32 [%rd3], %r1;",
    "one lane before all memory": "mul.wide.u32 %rd3, %r1, 0x1000001; shl.b64 %rd3, %rd3, 39;"
    " add.u64 %rd3, %rd3, %rd1; sub.u64 %rd3, %rd3, 1; ld.global.u8 %rs1, [%rd3];",
    "an address of 16 bits": "mov.u16 %rs1, 5; ld.global.u32 %r2, [%rs1];",
    "an address without a register": "ld.global.u32 %r2, [%rs200];",
    "an address of a predicate": "ld.shared.u32 %r2, [%p1];",
    "an address of 128 bits": "ld.global.u32 %r2, [%q1];",
    "eight parts": "mov.b64 {%rs1, %rs2, %rs3, %rs4, %rs5, %rs6, %rs7, %rs8}, %rd1;",
    "parts of nothing": "mov.b32 {}, %r1;",
    "a guard that is no predicate": "@%r8 add.u32 %r2, %r1, 1;",
    "a guard without a register": "@%r99999 add.u32 %r2, %r1, 1;",
    "a guard of 64 bits": "@!%rd1 st.global.u32 [%rd1], %r1;",
    "a shared address of 64 bits": "ld.shared.u32 %r2, [%rd2];",
    "a shared address that wraps": "mov.u64 %rd3, 0x8000000000000000; ld.shared.u8 %rs2, [%rd3];",
    "the last shared address": "mov.u64 %rd3, 0x8000000000000400; st.shared.u32 [%rd3-4], %r1;",
    "an address in no block": "ld.shared::cluster.u32 %r2, [%rd2];",
    "an address in a block before": "mov.u64 %rd3, 0xfffffffffe000400;"
    " st.shared::cluster.u32 [%rd3], %r1;",
    "an atomic of 64 bits": "atom.shared.add.u32 %r2, [%rd2], 1;",
    "an atomic anywhere": "atom.add.u32 %r2, [%rd2], 1;",
    "an atomic in no block": "atom.shared::cluster.add.u32 %r2, [%rd2], 1;",
    "a global atomic anywhere": "mov.u64 %rd3, 0xfffffffffffffffc; red.global.add.u32 [%rd3], 1;",
    "a local address anywhere": "ld.local.u32 %r2, [%rd2];",
    "a local address before": "ld.local.u32 %r2, [own-8];",
    "a vector of four of 128 bits": "ld.global.v4.b128 {%q1, %q2, %q1, %q2}, [%rd1];",
    "a vector of eight of 64 bits": "ld.global.v8.b64"
    " {%rd1, %rd2, %rd3, %rd4, %rd5, %rd6, %rd7, %rd8}, [%rd1];",
    "two vectors": "ld.global.v4.v2.b64 {%rd1, %rd2, %rd3, %rd4}, [%rd1];",
    "an mbarrier anywhere": "mov.u32 %r2, 0xfffffff0; mbarrier.init.shared.b64 [%r2], 1;",
    "an mbarrier before": "mbarrier.init.shared.b64 [place-64], 1;",
    "an mbarrier of a wild address": "mov.u64 %rd3, 0xdead000000000400;"
    " mbarrier.init.shared.b64 [%rd3], 1;",
    "an arrival anywhere": "mbarrier.arrive.shared.b64 %rd3, [%rd2];",
    "a copy to anywhere": "cp.async.ca.shared.global [%rd2], [%rd1], 4; cp.async.wait_all;",
    "a copy from anywhere": "cp.async.ca.shared.global [place], [%rd2], 4; cp.async.wait_all;",
    "a bulk copy of everything": "mov.u32 %r2, 0xfffffff0;"
    " cp.async.bulk.global.shared::cta.bulk_group [%rd1], [place], %r2;",
    "a tensor map anywhere": "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
    " [%rd2, {%r1, %r1}], [place];",
    "a matrix anywhere": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%rd2];",
    "a matrix of few registers": "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16"
    " {%r2, %r3}, [%r1], 16;",
    "a branch into nothing": "bra 5;",
    "a number of 5,000 digits": f"mov.u32 %r2, {'9' * 5000};",
    "a number of 4,000 digits": f"mov.u32 %r2, {'9' * 4000};",
    "an offset of 4,000 digits": f"ld.global.u32 %r2, [%rd1+{'9' * 4000}];",
    "a table of 60 digits": f"lop3.b32 %r2, %r1, %r1, %r1, {'9' * 60};",
    "registers without end": ".reg .b32 %x<999999999>; mov.u32 %x5, 1; bra END; END:",
    "registers of 5,000 digits": f".reg .b32 %x<{'9' * 5000}>;",
    "terabytes of shared memory": ".shared .b8 all[9999999999999];",
    "terabytes of local memory": ".local .b8 all[9999999999999];",
    "a name that is left out": ".reg .b32 _; mov.b64 %rd3, {_, %r1}; ld.param.u32 %r2, [out+5];",
    "an alignment of 0": ".shared .align 0 .b8 all[8];",
    "an alignment of 3": ".shared .align 3 .b8 all[8];",
    "an alignment of 2^60": ".local .align 1152921504606846976 .b8 all[8];",
    "elements of 4 bits": ".shared .b4 all[8];",
    "a comment that never ends": "/* " * 50000,
    "a lane that is none": "shfl.sync.idx.b32 %r2, %r1, %r1, 0x1f1f, 0xffffffff;"
    " ld.param.u32 %r2, [out+5];",
}
#: Text before the kernel, and the kernel's body.
MODULES = {
    "terabytes of global memory": (".global .b8 all[9999999999999];", "mov.u64 %rd3, all;"),
    "terabytes of constants": (".const .b8 all[9999999999999];", "mov.u64 %rd3, all;"),
    "a global alignment of 0": (".global .align 0 .b8 all[4];", "mov.u64 %rd3, all;"),
    "a variable that is freed": (
        ".global .align 8 .b8 all[4194304]; .extern .func free (.param .b64 p);",
        ("mov.u64 %rd3, all; { .param .b64 q; st.param.b64 [q], %rd3; call.uni free, (q); }"
        " st.global.u32 [%rd3+65536], %r1;"),
    ),
    "terabytes of malloc": (
        ".extern .func (.param .b64 r) malloc (.param .b64 p);",
        ("mov.u64 %rd3, 0x7fffffffffff; { .param .b64 q; .param .b64 s; st.param.b64 [q], %rd3;"
        " call.uni (s), malloc, (q); ld.param.b64 %rd4, [s]; } st.global.u32 [%rd4], %r1;"),
    ),
    "a line of gigabytes": (
        ('.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);'
        ' .global .b8 form[16] = {37, 57, 57, 57, 57, 57, 57, 57, 57, 57, 100, 0};'),
        ("mov.u64 %rd3, form; { .param .b64 f; .param .b64 a; .param .b32 s;"
        " st.param.b64 [f], %rd3; st.param.b64 [a], %rd1; call.uni (s), vprintf, (f, a); }"),
    ),
    "a text anywhere": (
        ".extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);",
        ("mov.u64 %rd3, 0x0100000000000001; { .param .b64 f; .param .b64 a; .param .b32 s;"
        " st.param.b64 [f], %rd3; st.param.b64 [a], %rd1; call.uni (s), vprintf, (f, a); }"),
    ),
    "calls without end": (
        ".func f () { .reg .b64 %x<300>; mov.u64 %x1, %x2; call.uni f; ret; }", "call.uni f;",
    ),
    "entries without a body": (".entry a " * 12000, "ld.param.u32 %r2, [out+5];"),
    "a call of nothing": ("", "mov.u64 %rd3, 5; call.uni %rd3, ();"),
}  # fmt: skip
#: What a launch has instead.
LAUNCHES: dict[str, dict[str, Any]] = {
    "an array of /dev/zero": {"memory": [{"name": "out", "file": "/dev/zero"}]},
    "an array of a pipe": {"memory": [{"name": "out", "file": "pipe"}]},
    "an .npy of a pipe": {"memory": [{"name": "out", "file": "pipe.npy"}]},
    "an .npy of terabytes": {"memory": [{"name": "out", "file": "large.npy"}]},
    "arrays of terabytes": {
        "memory": [
            {"name": f"out{n}", "type": "f64", "shape": [2**26], "fill": 1} for n in range(4000)
        ]
    },
    "elements without end": {
        "memory": [{"name": "out", "type": "f64", "shape": [10**9, 10**9], "fill": 1}]
    },
    "an array above all addresses": {
        "memory": [{"name": "out", "type": "u8", "shape": [4], "fill": 1, "address": 2**64 - 2}]
    },
    "a result in no array": {
        "result": {
            "address": 5,
            "type": "u32",
            "shape": [16],
            "exact": "large.npy",
            "bound": "large.npy",
        }
    },
    "shared memory without end": {"shared": 10**15},
    "a grid without end": {"grid": [10**9, 10**9, 10**9]},
    "a parameter of /dev/zero": {"parameters": [{"file": "/dev/zero"}]},
    "numbers of 5,000 digits": {"parameters": [{"type": "u64", "value": 10**4200}]},
}


def kernel(body: str, before: str = "") -> str:
    """A module with one kernel."""
    return f"{HEAD}{before}\n.visible .entry k(.param .u64 out)\n{{\n{REGISTERS}{body}\nret;\n}}\n"


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """PTX and the launch by name."""
    return {
        **{name: (kernel(body), LAUNCH) for name, body in BODIES.items()},
        **{name: (kernel(body, before), LAUNCH) for name, (before, body) in MODULES.items()},
        **{name: (kernel(""), {**LAUNCH, **changes}) for name, changes in LAUNCHES.items()},
    }


def run_limited(ptx: str, launch: dict[str, Any]) -> None:
    """Run the command with few resources, and write how it ended."""
    from builder.__main__ import run

    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    signal.alarm(100)  # one that waits for a pipe takes no time
    Path("kernel.ptx").write_text(ptx, "utf-8")
    Path("launch.json").write_text(json.dumps(launch), "utf-8")
    os.mkfifo("pipe")
    os.mkfifo("pipe.npy")
    header = b"{'descr': '<u4', 'fortran_order': False, 'shape': (4398046511104,), }"
    header = header.ljust(117) + b"\n"
    Path("large.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["ptx", "run", "kernel.ptx", "--launch", "launch.json", "--schedule", "eager"])
    print(json.dumps({"code": code, "out": out.getvalue()[:2000], "err": err.getvalue()[:2000]}))


def main(names: list[str]) -> None:
    """Run the cases that are named, or all."""
    from builder.ptx import runs
    from builder.ptx.native import core

    assert core() is not None, runs
    for name, (ptx, launch) in cases().items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if not child:
                os.chdir(folder)
                os.dup2(said.fileno(), 1)
                run_limited(ptx, launch)
                sys.stdout.flush()
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            lines = said.read().splitlines()
        print(json.dumps({"name": name, "status": status, **json.loads((lines or ["{}"])[-1])}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
