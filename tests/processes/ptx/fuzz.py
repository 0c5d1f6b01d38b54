"""Changed kernels, launches and tables run in the core, which is built with sanitizers.

``python -m tests.processes.ptx.fuzz COUNT SEED FILE``, with ``LD_PRELOAD`` of gcc's libasan: the
number of the program that runs is in FILE, for when it ends this process.  The last line says how
many programs there were, by what came of them.  A program may be refused or end in a fault; any
other exception is a failure.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from builder.errors import SparkBuildError
from builder.ptx import grid, native
from builder.ptx.grid import Schedule
from builder.ptx.launchfile import read_launch
from builder.ptx.machine import Fault
from builder.ptx.program import Program
from builder.ptx.runs import run_once
from builder.ptx.source import module_of
from tests.processes.ptx.hostile import BODIES
from tests.processes.ptx.sanitized import sanitize
from tests.unit.ptx.test_ptx_native import FLOATS, INTEGERS, NARROW, RACES, RECORDED
from tests.unit.ptxworld import source

NUMBERS = [
    "0", "1", "-1", "3", "4", "7", "8", "12", "16", "31", "32", "33", "64", "255", "256", "1023",
    "1024", "4095", "65536", "0x7fffffff", "0x80000000", "0xffffffff", "0xfffffffc", "-4", "-64",
    "0x7fffffffffffffff", "0x8000000000000000", "0xffffffffffffffff", "0x100000000000000",
    "0x80000000000000", "0x0100000000000400", "0x400000000000", "16777216",
]  # fmt: skip
REGISTERS = [
    *(f"%{kind}{n}" for kind in ("p", "rs", "r", "f", "rd", "q") for n in (0, 1, 2, 9, 19)),
    "%r59", "%r60", "%r99999", "%tid.x", "%laneid", "%clock64", "_", "p_in", "p_out", "dynamic",
    "WARP_SZ", "nowhere",
]  # fmt: skip
TYPES = [
    *(f".{kind}{bits}" for kind in "busf" for bits in (8, 16, 32, 64)), ".pred", ".b128", ".f16x2",
    ".bf16", ".f16", ".bf16x2",
]  # fmt: skip
WORDS = [
    ".shared", ".global", ".local", ".param", ".const", ".shared::cluster", ".v2", ".v4", ".v8",
    ".cc", ".wide", ".lo", ".hi", ".ftz", ".sat", ".rn", ".volatile", ".relaxed.gpu", ".sync",
]  # fmt: skip
MORE = [
    "ld.global.v2.b64 {%rd4, %rd5}, [%rd1];", "st.shared.v4.b32 [%r9], {%r1, %r2, %r3, %r4};",
    "mov.b64 {%r1, %r2}, %rd1;", "mov.b64 %rd4, {%r1, %r2};", "mov.b32 {%rs1, %rs2}, %r1;",
    "mov.b32 {%rs1, %rs2, %rs3, %rs4}, %r1;", "mov.b32 %r1, {%rs1, %rs2};",
    "ld.param.u32 %r5, [p_in+4];", "cvta.shared.u64 %rd4, %rd5; ld.u32 %r5, [%rd4];",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r9];",
    "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r9], {%r5, %r6};",
    "atom.shared.add.u32 %r5, [%r9], 1;", "atom.global.cas.b64 %rd4, [%rd2], %rd4, %rd5;",
    "shfl.sync.bfly.b32 %r5|%p1, %r1, 1, 31, 0xffffffff;", "vote.sync.ballot.b32 %r5, %p1, -1;",
    "elect.sync _|%p1, 0xffffffff;", "prmt.b32 %r5, %r1, %r2, 0x5410;", "bar.sync 0;",
    "lop3.b32 %r5, %r1, %r2, %r3, 0x96;", "mbarrier.init.shared.b64 [%r9], 1;",
    "cp.async.ca.shared.global [%r9], [%rd1], 16; cp.async.wait_all;", "@%p1 bra END; END:",
    "setp.lt.u32 %p1, %r1, %r2;", "mbarrier.arrive.shared.b64 %rd4, [%r9];",
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, "
    "{%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};"),
    ("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32."
    "ue4m3 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4}, %r1, "
    "{0, 0}, %r2, {0, 0};"),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd1], 64, [%r9];",
    "st.local.v2.u32 [%rd3], {%r1, %r2};", "mapa.shared::cluster.u32 %r9, %r9, 1;",
    "tensormap.replace.tile.global_address.global.b1024.b64 [%rd2], %rd1;",
    "addc.cc.u32 %r5, %r1, %r2;", "createpolicy.fractional.L2::evict_first.b64 %rd4, 0f3F800000;",
    ("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, "
     "[%r9], 16;"),
    ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r9], %r1, "
     "[%r9];"),
]  # fmt: skip
LAUNCH: dict[str, Any] = {
    "schema": 1,
    "grid": [1, 1, 1],
    "block": [32, 1, 1],
    "shared": 8704,
    "parameters": [{"array": "in"}, {"array": "out"}],
    "memory": [
        {"name": "in", "type": "u32", "shape": [512], "fill": 3},
        {"name": "out", "type": "u32", "shape": [512], "fill": 0, "writable": True},
    ],
}


class Maker:
    """Makes one program after the other, from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        bodies = (*RECORDED, *FLOATS, *INTEGERS, *NARROW, *RACES.values(), *BODIES.values())
        self.bodies = [one for one in bodies if len(one) < 3000]

    def _replaced(self, text: str, pattern: str, values: list[str]) -> str:
        places = [*re.finditer(pattern, text)]
        if not places:
            return text
        one = self.chance.choice(places)
        return text[: one.start()] + self.chance.choice(values) + text[one.end() :]

    def _statements(self, text: str) -> str:
        parts = text.split(";")
        at = self.chance.randrange(len(parts))
        match self.chance.randrange(4):
            case 0:
                parts.insert(at, self.chance.choice(MORE).rstrip(";"))
            case 1:
                parts.insert(at, parts[self.chance.randrange(len(parts))])
            case 2:
                del parts[at]
            case _:
                guard = self.chance.choice(["@%p1 ", "@!%p2 ", "@%r1 ", "@%rd9 ", "@%p99 "])
                parts[at] = f" {guard}{parts[at].strip()}"
        return ";".join(parts)

    def text(self, body: str) -> str:
        """A body with a few changes."""
        for _ in range(self.chance.choice([1, 1, 1, 2, 3])):
            match self.chance.randrange(7):
                case 0:
                    body = self._replaced(body, r"%[a-z]+[0-9]*(\.[xyz])?", REGISTERS)
                case 1 | 6:
                    body = self._replaced(body, r"(?<![\w%.$])-?(0x[0-9a-f]+|[0-9]+)\b", NUMBERS)
                case 2:
                    body = self._replaced(body, r"\.[busf](8|16|32|64)\b|\.pred", TYPES)
                case 3:
                    body = self._replaced(body, r"\.(shared|global|local|v2|v4|wide|lo)\b", WORDS)
                case _:
                    body = self._statements(body)
        return body

    def launch(self) -> dict[str, Any]:
        """A launch, which may be changed."""
        launch: dict[str, Any] = json.loads(json.dumps(LAUNCH))
        if self.chance.random() < 0.85:
            launch["block"] = [self.chance.choice([1, 31, 32, 33, 64, 96]), 1, 1]
            return launch
        key = self.chance.choice(["grid", "block", "shared", "parameters", "memory", "cluster"])
        number = int(self.chance.choice(NUMBERS), 0)
        match key:
            case "grid" | "block" | "cluster":
                launch[key] = [self.chance.choice([1, 2, 3, number]), 1, 1]
            case "shared":
                launch[key] = number
            case "parameters":
                launch[key][1] = self.chance.choice(
                    [{"array": "out", "offset": number}, {"type": "u64", "value": number}]
                )
            case _:
                field = self.chance.choice(["address", "shape", "fill"])
                launch[key][1][field] = [number] if field == "shape" else number
        return launch

    def table(self, table: tuple[Any, Any]) -> tuple[Any, Any]:
        """The core's table, with a few changes."""
        ops, lists = (one.copy() for one in table)
        for _ in range(self.chance.randrange(1, 6)):
            number = int(self.chance.choice(NUMBERS), 0)
            number = number if -(2**31) <= number < 2**31 else self.chance.randrange(-9, 99)
            if self.chance.random() < 0.2:
                lists[self.chance.randrange(len(lists))] = number
                continue
            field = self.chance.choice([*(ops.dtype.names or ()), "code"])
            small = self.chance.randrange(max(native._CODE.values()) + 2)
            at = self.chance.randrange(len(ops))
            if field != "line":
                ops[field][at] = small if field == "code" else number
        return ops, lists


def run_one(maker: Maker, folder: Path) -> str:
    """Run a program; what came of it."""
    body, tables = maker.chance.choice(maker.bodies), maker.chance.random() < 0.4
    text = source(body if tables else maker.text(body))
    (folder / "k.ptx").write_text(text, "utf-8")
    (folder / "launch.json").write_text(json.dumps(maker.launch()), "utf-8")
    try:
        file = read_launch(folder / "launch.json", folder / "k.ptx")
        program = Program(module_of(file.ptx).kernel("k"))
        if tables:
            program.table = maker.table(program.table)
        schedule = Schedule(maker.chance.choice(["eager", "lazy", "random"]), 1)
        single = run_once(file, program, schedule, watch=maker.chance.random() < 0.6)
    except SparkBuildError as error:
        return "not understood" if error.__cause__ else "refused"
    except Fault:  # of a parameter space that is not the kernel's
        return "fault"
    return "fault" if single.run.fault else "ran"


def main(count: int, seed: int, place: Path) -> None:
    """Run so many programs."""
    sanitize()
    grid._ENDLESS, grid._PATIENCE, grid._ROUNDS = 3000, 8, 16
    maker, came, began = Maker(seed), Counter[str](), seed
    np.seterr(all="ignore")
    with tempfile.TemporaryDirectory() as folder, place.open("w") as said:
        for number in range(count):
            maker.chance.seed(began * 1_000_003 + number)
            said.seek(0)
            said.write(f"{number:9}\n")
            said.flush()
            came[run_one(maker, Path(folder))] += 1
    print(json.dumps(came))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
