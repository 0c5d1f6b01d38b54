"""Races that `spark-build ptx` finds in public suites of labelled CUDA programs.

    python -m benchmarks.race_suites indigo scor hecbench --work WORK

Each suite is fetched by its commit; ``--folder SUITE=FOLDER`` takes a local copy.  ``nvcc`` on PATH
compiles each program to PTX, and `builder.ptx.api` runs it.  Nothing of a suite is stored here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.errors import SparkBuildError
from builder.ptx.api import run
from builder.ptx.source import kernels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What PTX is made for, and the options that all programs get.
NVCC: tuple[str, ...] = ("nvcc", "-ptx", "-lineinfo", "-arch=compute_121", "-w")
SCHEDULES = ("eager", "random:1")
#: Programs of two threads and a lock race in some orders only.
MANY_SCHEDULES = ("eager", *(f"random:{seed}" for seed in range(1, 13)))
#: What is reported beside races: marchingCubes sums words of shared memory that nothing wrote.
NO_RACE = {"read of uninitialised memory"}
#: Elements of an array: as on a GPU, whose pages of 2 MB lie behind the end of smaller ones.
ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Program:
    """A program of a suite: its source, its label, and its launches (grid and block)."""

    suite: str
    name: str
    source: Path
    racy: bool
    launches: tuple[tuple[Any, Any], ...]
    options: tuple[str, ...] = ()
    schedules: tuple[str, ...] = SCHEDULES
    #: an expression for the kernels that are launched: all by default
    kernel: str = ""
    #: arguments; by default what `arguments` makes
    given: tuple[Any, ...] = ()
    #: bytes of dynamic shared memory
    shared: int = 0
    #: expressions for the source, and what takes the place of their matches
    edits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What was found in a program."""

    suite: str
    name: str
    racy: bool
    #: kinds of races; None if it could not be run
    races: tuple[str, ...] | None
    #: why it was refused, or a launch did not end
    reason: str
    seconds: float

    @property
    def column(self) -> str:
        """The column of the table in which it counts."""
        if self.races is None:
            return "not compiled" if self.reason.startswith("nvcc") else "refused"
        if self.racy:
            return "found" if self.races else "missed"
        return "false alarm" if self.races else "silent"


@dataclass(frozen=True)
class Suite:
    """Where a suite is, and which programs it has."""

    repository: str
    commit: str
    programs: Callable[[Path], Iterator[Program]]
    #: found and missed by other tools, as published
    published: str = ""
    #: the folders that are fetched; all by default
    folders: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------- the suites


def indigo(folder: Path) -> Iterator[Program]:
    """Indigo as in HiRace's artifact: the name says which bugs a program has."""
    include = (f"-I{folder / 'indigo' / 'indigo_include'}",)
    for source in sorted((folder / "indigo" / "indigo_sources").rglob("*.cu")):
        racy = re.search("(atomic|guard|sync|race)Bug", source.stem) is not None
        # a block, a warp or a thread for each of 100 nodes; and persistent ones that go round
        yield Program("indigo", source.stem, source, racy, ((104, 64), (3, 64)), include)


def scor(folder: Path) -> Iterator[Program]:
    """ScoR's micro-benchmarks."""
    for source in sorted((folder / "microbenchmarks" / "src").glob("*.cu")):
        text = source.read_text()
        sizes = [
            int(found[1]) if (found := re.search(rf"#define {name}\s+(\d+)", text)) else 1
            for name in ("NBLOCKS", "TPERBLK")
        ]
        launch = sizes[0], sizes[1]
        racy = source.stem.startswith("race_")
        yield Program("scor", source.stem, source, racy, (launch,), (), MANY_SCHEDULES)


def scor_applications(folder: Path) -> Iterator[Program]:
    """The kernels of ScoR's applications, with and without ``RACEY``, in small sizes.

    Work that blocks steal from each other is split unevenly, so that some is stolen.
    """
    for program in _applications(folder / "benchmarks"):
        options = (*program.options, f"-I{program.source.parent}")
        yield replace(program, racy=False, options=options)
        yield replace(program, name=f"{program.name}, racy", options=(*options, "-DRACEY"))


def _applications(root: Path) -> Iterator[Program]:
    i32, f32, numbers = np.int32, np.float32, np.random.default_rng(1)
    blocks, threads = 4, 64

    def zeros(count: int, dtype: Any = i32) -> Any:
        return np.zeros(count, dtype)

    def application(folder: str, short: str, kernel: str, *given: Any, **more: Any) -> Program:
        sizes = {"blocks": blocks, "threads": threads, **more}
        return Program(
            "scor-apps", f"{folder}, {kernel}", root / folder / f"{short}_kernel.cu", True,
            ((sizes["blocks"], sizes["threads"]),),
            (f"-DNBLOCKS={sizes['blocks']}", f"-DNTHREADS={sizes['threads']}"),
            ("eager", "random:1", "random:2", "random:3"), kernel=kernel, given=given,
            edits=more.get("edits", ()),
        )  # fmt: skip

    filters, values = numbers.random(5, f32), numbers.random(600, f32)
    yield application(
        "1dconv", "1dconv", "convolveKernel", filters, i32(5), values, i32(600), zeros(600, f32)
    )
    vertices, edges = 512, 768
    ends = np.sort(numbers.integers(0, vertices, (edges, 2)).astype(i32), axis=1)
    first, second = ends[:, 0].copy(), ends[:, 1].copy()

    def shares(count: int) -> tuple[Any, Any]:
        """Where the work of each block begins and ends: the first has half of it."""
        places = np.array([0, count // 2, count * 3 // 4, count * 7 // 8, count], i32)
        return places[:-1].copy(), places[1:].copy()

    colors = numbers.integers(0, 3, vertices).astype(i32)
    of_vertices, of_edges, own = shares(vertices), shares(edges), (zeros(blocks), zeros(blocks))
    coloring, connectivity = ("graph-coloring", "gcol"), ("graph-connectivity", "gcon")
    yield application(
        *coloring, "assignColorsKernel", *of_vertices, zeros(vertices), zeros(vertices),
        zeros(vertices), zeros(vertices), *own,
    )  # fmt: skip
    yield application(
        *coloring, "detectConflictsKernel", *of_edges, first, second, zeros(vertices), colors,
        zeros(1), *own,
    )  # fmt: skip
    yield application(
        *coloring, "forbidColorsKernel", *of_edges, first, second, zeros(vertices), colors,
        zeros(vertices), *own,
    )  # fmt: skip
    components = np.arange(vertices, dtype=i32)
    linked = np.maximum(components - 1, 0).astype(i32)
    yield application(*connectivity, "initKernel", *of_vertices, zeros(vertices), *own)
    yield application(*connectivity, "linkKernel", *of_edges, first, second, components, *own)
    yield application(*connectivity, "compressKernel", *of_vertices, linked, *own)
    sizes = (i32(2), i32(128), i32(32))
    left, right = (numbers.integers(0, 9, count).astype(i32) for count in (2 * 128, 128 * 32))
    yield application(
        "matrix-multiplication", "mm", "matMultKernel", left, right, zeros(2 * 32), *sizes,
        zeros(blocks * 32), zeros(blocks * 32), zeros(1024),
    )  # fmt: skip
    summed = "const int *, volatile int *, volatile int *, int *, unsigned int"
    yield application(
        "reduction", "red", "reduceSinglePass", numbers.integers(0, 9, 1024).astype(i32),
        zeros(blocks), zeros(blocks * 128), zeros(blocks * 128), np.uint32(1024), threads=128,
        edits=((r"\Z", f"\ntemplate __global__ void reduceSinglePass<128, true>({summed});\n"),),
    )  # fmt: skip
    cells = numbers.integers(0, 2, 2 * blocks * threads).astype(i32)
    yield application(
        "rule-110", "r110", "rule110Kernel", cells, zeros(len(cells)), zeros(blocks * threads),
        i32(len(cells)), i32(1),
    )  # fmt: skip
    yield application("uts", "uts", "parTreeSearch", *_trees(2, threads), blocks=2)


def _trees(blocks: int, threads: int) -> Iterator[Any]:
    """What the host code of ``uts`` makes: two kinds of stacks of each block, and their nodes."""
    for depth, work in ((4 * threads, 1), (4000, 0)):
        stats = np.array([[depth, work, depth * b, 0, work, 0] for b in range(blocks)], np.int32)
        nodes = np.zeros((blocks, depth, 4), np.uint8)
        if work:
            nodes[:, 0] = [[0, 255, 7, b + 1] for b in range(blocks)]
        yield from (stats.reshape(-1), nodes.reshape(-1))
    yield np.array([4, 2], np.int32).tobytes()  # the height, and children of a node


def samples(folder: Path) -> Iterator[Program]:
    """NVIDIA's samples of racecheck: both have a race."""
    for name, threads in (("block_error", 128), ("warp_error", 64)):
        source = folder / "Racecheck" / f"{name}.cu"
        yield Program("samples", name, source, True, ((1, threads),))


#: GPUVerify's annotations, which its own compiler knows.
GPUVERIFY = tuple(f"-D{name}(...)=" for name in ("__ensures", "__invariant", "__assume"))


def gpuverify(folder: Path) -> Iterator[Program]:
    """GPUVerify's CUDA tests that are about races: correct ones, and those whose kernels race."""
    root = folder / "testsuite" / "CUDA"
    for source in sorted(root.rglob("*.cu")):
        lines = source.read_text(errors="replace").split("\n")
        label = lines[0].strip("/ \r").lower()
        expected = "\n".join(lines[:12])
        racy = "possible" in expected and "race" in expected
        if label != "pass" and not (label == "xfail:not_all_verified" and racy):
            continue
        grid, block = (_size(lines[1], name) for name in ("gridDim", "blockDim"))
        # with --warp-sync lanes are taken to run in step, which PTX does not promise
        if not grid or not block or np.prod(block) > 1024 or "--warp-sync" in lines[1]:
            continue
        if "__requires(" in "".join(lines):  # it holds for some arguments only
            continue
        defines = (*re.findall(r"-D\S+", lines[1]), *GPUVERIFY)
        name = str(source.parent.relative_to(root))
        yield Program("gpuverify", name, source, racy, ((_few(grid), block),), defines)


def _size(line: str, name: str) -> tuple[int, ...]:
    found = re.search(rf"--{name}=\[?([\d,]+)", line)
    return tuple(map(int, found[1].split(","))) if found else ()


def _few(grid: tuple[int, ...]) -> tuple[int, ...]:
    """At most four blocks along each axis: a race between blocks needs two."""
    return tuple(min(size, 4) for size in grid)


def gpurepair(folder: Path) -> Iterator[Program]:
    """GPURepair's own micro-benchmarks: each lacks the barriers that its tool puts in."""
    root = folder / "tests" / "testsuite" / "MicroBenchmarks"
    for source in sorted(root.glob("*/kernel.cu")):
        # with 64 threads in place of the 32 of its first line two warps race as well
        yield Program("gpurepair", source.parent.name, source, True, ((1, 64),))


def weft(folder: Path) -> Iterator[Program]:
    """Weft's negative tests: named barriers that warps use in an invalid way."""
    for source in sorted((folder / "examples" / "negatives").glob("*.cu")):
        threads = 96 if source.stem == "over" else 64
        yield Program("weft", source.stem, source, True, ((1, threads),), (), MANY_SCHEDULES)


SYNC = "__syncthreads();"


def hecbench(folder: Path) -> Iterator[Program]:
    """HeCBench's kernels with a race that somebody filed; and with the barrier that each lacks.

    The numbers are those of its issues.  #264 (``sssp``) is left out: its issue does not say which
    order is lacking.  #126 and #133 are fixed at this commit; #255 needs more than a barrier.
    """
    for program, *barriers in _filed(folder / "src"):
        yield replace(program, name=f"{program.name} as filed")
        if barriers:
            edits = (*program.edits, *barriers)
            yield replace(program, name=f"{program.name} with barriers", racy=False, edits=edits)


def _filed(source: Path) -> Iterator[tuple[Any, ...]]:
    """Programs as they were filed, each with the edits that add its barriers."""
    u8, i32, u32, f32 = np.uint8, np.int32, np.uint32, np.float32

    def floats(count: int) -> Any:
        return np.random.default_rng(1).random(count, f32)

    def zeros(*dtypes: Any) -> tuple[Any, ...]:
        return tuple(np.zeros(ELEMENTS, dtype) for dtype in dtypes)

    def filed(name: str, kernel: str, grid: Any, block: Any, file: str = "main.cu") -> Program:
        path = source / f"{name.partition(' ')[2]}-cuda" / file
        return Program("hecbench", name, path, True, ((grid, block),), kernel=kernel)

    surfel = replace(
        filed("#253 surfel", "surfel_render_tile", (1, 2), (16, 16)),
        given=(floats(512 * 7), i32(512), f32(0.02), i32(16), i32(32), *zeros(f32)),
    )
    yield surfel, (r"(dMin = t;\s+\}\s+\})(\s+\}\s+d\[y)", rf"\1 {SYNC}\2")
    counts = (u32, np.uint16, i32, u32, u32, u32, np.uint64, f32, f32, f32, f32)
    cubes = replace(
        filed("#254 marchingCubes", "generatingTriangles", 2, (4, 4, 8)),
        given=(f32(0.5), *zeros(*counts)),
        # as in the issue: otherwise nvcc moves the reads behind the next barrier
        edits=((r"__shared__ (unsigned int sums(Vertices|Triangles))", r"__shared__ volatile \1"),),
    )
    yield cubes, (r"unsigned int interOffsetVertices\(", rf"{SYNC} \g<0>")
    morphology = replace(
        filed("#255 morphology", "vhgw_horiz", (2, 2), 64, "morphology.cu"),
        given=(*zeros(u8, u8), i32(128), i32(2), i32(64)),
        shared=4 * 64,
    )
    yield (morphology,)
    sizes = (i32(2), i32(80), i32(64), i32(2))
    sosfil = replace(
        filed("#256 sosfil", "sosfiltIf", 2, 64),
        given=(*sizes, floats(64 * 6), floats(2 * 64 * 2), floats(2 * 80)),
        shared=4 * 64 * (1 + 2 + 6),
    )
    yield (
        sosfil,
        (r"(x_n = s_out\[tx - 1\];\n      \})", rf"\1 {SYNC}"),
        (r"if \( tx > n \) \{\s+(x_n = [^;]*;)", rf"if (tx > n) \1 {SYNC} if (tx > n) {{"),
    )
    square = np.zeros(192 * 192, i32)
    warshall = replace(
        filed("#261 floydwarshall2", "FWrem_64", 4, 1024),
        given=(square, i32(192), square.copy(), square.copy(), i32(0), i32(2)),
        options=(f"-I{source / 'mis-cuda'}",),
        schedules=("eager",),
    )
    yield warshall, (r"if \(\(y == z\)", rf"{SYNC} \g<0>")
    hungarian = replace(
        filed("#263 hungarian", "calc_min_in_(rows|cols)", 1, 64),
        options=("-D_n_=64", "-D_range_=64"),
    )
    stepwise = r"{ data one = \2; __syncwarp(); \1 = one; __syncwarp(); }"
    yield hungarian, (r"(sdata\[tid\]) = (min\([^;]*\));", stepwise)


SUITES = {
    "indigo": Suite(
        "JohnJacobsonIII/HiRace-Artifact-SC24", "44a935f90acfe43c6178b2187ea84c9ab0c01450", indigo,
        "HiRace 346 / 0, iGUARD 298 / 48, Compute Sanitizer 92 / 254",
    ),
    "scor": Suite("csl-iisc/ScoR", "6dc3507ecc419aac6ea3a49ec746b610d5029219", scor),
    "scor-apps": Suite(
        "csl-iisc/ScoR", "6dc3507ecc419aac6ea3a49ec746b610d5029219", scor_applications
    ),
    "samples": Suite(
        "NVIDIA/compute-sanitizer-samples", "1e1fab8e25148127f5dec10210ac70b799d1c36f", samples
    ),
    "gpuverify": Suite(
        "mc-imperial/gpuverify", "49219770aad01231edd0d8e0fa3ed036006cf32a", gpuverify
    ),
    "gpurepair": Suite(
        "cs17resch01003/gpurepair", "c5cd6ed20055e711e0ed2e05c0381462fb92b1df", gpurepair
    ),
    "weft": Suite("lightsighter/Weft", "d9ee750d1df2fac274bdf3874d729a606da349e4", weft),
    "hecbench": Suite(
        "ORNL/HeCBench", "f27000a5188f8ac79bd43fc95a1b3f890c18823d", hecbench,
        folders=tuple(
            f"src/{name}-cuda" for name in (
                "surfel", "marchingCubes", "morphology", "sosfil", "floydwarshall2", "mis",
                "hungarian",
            )
        ),
    ),
}  # fmt: skip


def fetched(suite: Suite, folder: Path) -> Path:
    """A suite at its commit, from the network."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True)
        url = f"https://github.com/{suite.repository}"
        for words in (
            ("init", "-q"),
            *((("sparse-checkout", "set", *suite.folders),) if suite.folders else ()),
            ("fetch", "-q", "--depth", "1", "--filter=blob:none", url, suite.commit),
            ("checkout", "-q", "FETCH_HEAD"),
        ):
            subprocess.run(("git", "-C", str(folder), *words), check=True)
    return folder


# ----------------------------------------------------------------------------------- one program


def edited(program: Program) -> str:
    """The source of a program, with its edits.

    Raises:
        RuntimeError: an expression matches nothing.
    """
    text = program.source.read_text("utf-8", "replace")
    for old, new in program.edits:
        text, count = re.subn(old, new, text)
        if not count:
            raise RuntimeError(f"{program.source} has nothing that matches {old}")
    return text


def compiled(program: Program, work: Path) -> str:
    """The PTX of a program.

    Raises:
        RuntimeError: nvcc does not compile it.
    """
    file = work / program.suite / f"{program.name.replace('/', '-')}.ptx"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        source = file.with_suffix(".cu")
        source.write_text(edited(program))
        include = f"-I{program.source.parent}"
        done = subprocess.run(
            (*NVCC, include, *program.options, "-o", str(file), str(source)),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            said = [line for line in done.stderr.split("\n") if "error" in line]
            raise RuntimeError(f"nvcc: {(said or ['failed'])[0][-120:]}")
    return file.read_text("utf-8")


def graph(folder: Path) -> dict[str, Any]:
    """What Indigo's host code makes of the graph DAG_100n_200e."""
    raw = np.fromfile(folder / "indigo" / "input" / "DAG_100n_200e.egr", np.int32)
    nodes, edges = int(raw[0]), int(raw[1])
    numbers = np.random.default_rng(1)
    first, second = (numbers.integers(0, most, max(nodes, edges)) for most in (nodes, edges))
    first[0] = second[0] = 0
    given: dict[str, Any] = {
        "nindex": raw[2 : 3 + nodes], "nlist": raw[3 + nodes : 3 + nodes + edges],
        "data1": first, "data2": second,
    }  # fmt: skip
    found = {name: np.zeros(ELEMENTS, np.int32) for name in given}
    for name, values in given.items():
        found[name][: len(values)] = values
    found["nindex"].flags.writeable = found["nlist"].flags.writeable = False
    return {**found, "numv": nodes}


def arguments(ptx: str, kernel: str) -> list[Any]:
    """An array of zeros for each pointer, 64 for each number."""
    found: list[Any] = []
    for one in kernels_of(ptx)[kernel].parameters.values():
        if one.size == 8:
            found.append(np.zeros(ELEMENTS, np.int32))
        else:
            found.append((64).to_bytes(one.size, "little"))
    return found


def examine(program: Program, work: Path, folder: Path) -> Outcome:
    """Compile and run a program."""
    begun, kinds, ends = time.process_time(), set[str](), list[str]()
    try:
        ptx = compiled(program, work)
        kernels = [
            name
            for name in re.findall(r"\.entry\s+([\w$]+)", ptx)
            if re.search(program.kernel, name)
        ]
        for kernel in kernels:
            given: Any = program.given or arguments(ptx, kernel)
            if program.suite == "indigo":
                given = graph(folder)
            for grid, block in program.launches:
                result = run(
                    ptx, kernel, grid, block, given,
                    shared=program.shared, schedules=program.schedules,
                )  # fmt: skip
                kinds |= {race.kind for race in result.races} - NO_RACE
                ends += result.faults
        if program.suite == "weft" and ends:  # what is wrong with them is that they do not end
            kinds.add("deadlock")
        reason = ends[0] if ends else "" if kernels else "no kernel"
        races: tuple[str, ...] | None = tuple(sorted(kinds)) if kernels else None
    except (SparkBuildError, RuntimeError) as error:
        races, reason = None, str(error)
    seconds = time.process_time() - begun
    return Outcome(program.suite, program.name, program.racy, races, reason, seconds)


# ------------------------------------------------------------------------------------------- tables


COLUMNS = ("found", "missed", "silent", "false alarm", "refused", "not compiled")


def table(outcomes: list[Outcome]) -> str:
    """The outcomes by suite."""
    rows = [
        f"| suite | programs | {' | '.join(COLUMNS)} | processor time |",
        "|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for suite in dict.fromkeys(one.suite for one in outcomes):
        own = [one for one in outcomes if one.suite == suite]
        counts = [sum(one.column == column for one in own) for column in COLUMNS]
        seconds = sum(one.seconds for one in own)
        cells = [suite, len(own), *counts, f"{seconds:.0f} s"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> None:
    """Run suites; print the table, and what is to be explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=[*SUITES], choices=[[], *SUITES])
    parser.add_argument("--work", type=Path, required=True, help="for clones and PTX")
    parser.add_argument("--folder", action="append", default=[], metavar="SUITE=FOLDER")
    parser.add_argument("--only", default="", help="programs whose names match this expression")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    folders = {name: Path(path) for name, _, path in (one.partition("=") for one in options.folder)}
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = []
        for name in options.suites:
            suite = SUITES[name]
            folder = folders.get(name) or fetched(suite, options.work / "suites" / name)
            waiting += [
                pool.submit(examine, program, options.work, folder)
                for program in suite.programs(folder)
                if re.search(options.only, program.name)
            ]
        outcomes = [one.result() for one in waiting]
    (options.work / "outcomes.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    print(table(outcomes))
    for name in options.suites:
        if SUITES[name].published:
            print(f"\n{name}, published (found / missed): {SUITES[name].published}")
    for one in outcomes:
        if one.column not in {"found", "silent"} or one.reason:
            print(
                f"{one.column}: {one.suite} {one.name}: {one.reason or ', '.join(one.races or ())}"
            )


if __name__ == "__main__":
    main()
