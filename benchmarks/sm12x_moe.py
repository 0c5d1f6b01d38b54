"""FlashInfer's SM12x kernels for FP8 and MXFP8 x MXFP4 experts (CuTe DSL), in the executor.

    python -m benchmarks.sm12x_moe FLASHINFER --torch TORCH --dsl DSL --work WORK

FLASHINFER is the package of a wheel; in TORCH and DSL is what ``pip install --target`` put there
(torch; nvidia-cutlass-dsl 4.8.0 with cuda-bindings).  FlashInfer's own functions choose the tile's
stages and the store, compile, and launch; the launch is recorded as level ``numbers`` does, and
run.  No GPU is needed.  The products are exact; an activation may differ from its value by a
rounding and what ``ex2.approx`` and ``rcp.approx`` may.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks.mutants import Subject
from builder.probes import launch_host, launch_probe
from builder.ptx.launchfile import compare, read_launch
from builder.ptx.machine import E2M1, from_e4m3
from builder.ptx.runs import program_of, run_once, schedules_of

if TYPE_CHECKING:
    from builder.ptx.memory import GlobalMemory

PACKAGE = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x"
#: What the modules import of FlashInfer, beside themselves.
ABSENT = ("flashinfer.utils", "flashinfer.autotuner", "flashinfer.api_logging")
FORMS = ("fp8", "mxfp8_mxfp4")
KINDS = ("gemm", "fc1_act", "fc1_act_q1", "fc2_finalize")
SCHEDULES = ("eager", "lazy", "random:1", "random:2")
#: Rows of each expert, columns and depth.
ROWS, N, K = (40, 0, 1, 150), 256, 512
#: Tokens that rows are added to.
TOKENS = 80


def prepare(given: argparse.Namespace) -> tuple[launch_host.Recorder, object]:
    """Import what compiles, and record launches instead of making them.

    The second is what C calls, and has to stay.
    """
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    paths = (given.torch, given.dsl, given.dsl / "nvidia_cutlass_dsl/dsl_packages")
    sys.path[:0] = [str(path.resolve()) for path in paths]
    library = launch_host.Library(str(work / "calls.so"), launch_probe.runtime_functions())
    os.environ.update(
        CUTE_DSL_ARCH="sm_121a", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_LINEINFO="1",
        CUTE_DSL_DUMP_DIR=str(work), CUTE_DSL_LIBS=library.path,
    )  # fmt: skip
    parts = PACKAGE.split(".")
    for count in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:count]))
        module.__path__ = [str(given.flashinfer.resolve().joinpath(*parts[1:count]))]
        sys.modules[module.__name__] = module
    for name in ABSENT:
        stand_in: Any = ModuleType(name)
        stand_in.__getattr__ = lambda word: (
            type(word, (), {}) if word[:1].isupper() else MagicMock()
        )
        sys.modules[name] = stand_in
    utils: Any = sys.modules["flashinfer.utils"]
    utils.ceil_div = lambda a, b: -(-a // b)
    utils.round_up = lambda a, b: -(-a // b) * b
    os.chdir(work)
    recorder = launch_host.Recorder()
    runtime = launch_host.Runtime(recorder.record)
    library.fill(runtime.callbacks())
    launch_probe.use_library(library.path)
    launch_probe.launch_instead(recorder)
    torch: Any = importlib.import_module("torch")
    torch.cuda.get_device_properties = lambda _device: SimpleNamespace(
        multi_processor_count=given.processors, major=12, minor=1
    )
    return recorder, (library, runtime)


def on_device(module: Any) -> None:
    """Let a module's tensors report to be on the device, and its stream be the default one."""
    plain, driver = module.from_dlpack, importlib.import_module("cuda.bindings.driver")
    module.from_dlpack = lambda one, **more: plain(launch_host.OnDevice(one), **more)
    module._stream = lambda: driver.CUstream(0)


def rows_of() -> tuple[Any, Any]:
    """The first row of each expert, and of each of its scales, which begin at a multiple of 4."""
    first = np.concatenate([[0], np.cumsum(ROWS)])
    return first, [(int(one) + 3 * expert) // 4 * 4 for expert, one in enumerate(first)]


def rows_to_add(draw: Any, count: int) -> Any:
    """Rows with eight values of 1 or -1 each: sums of some products are exact in bfloat16."""
    rows = np.zeros((count, K), np.int64)
    for row in rows:
        row[draw.choice(K, 8, replace=False)] = draw.choice([-1, 1], 8)
    return rows


def fp8_case(torch: Any, draw: Any, n: int, *, adds: bool) -> tuple[Any, Any]:
    """Arguments of the FP8 GEMM, a scale for 1x128 and 128x128 values, and the exact result.

    ``adds``: of a kernel that adds rows.
    """
    first, begin = rows_of()
    a, b = draw.integers(-4, 5, (first[-1], K)), draw.integers(-4, 5, (len(ROWS), n, K))
    a = rows_to_add(draw, first[-1]) if adds else a
    most = 0 if adds else 2
    of_a = 2.0 ** draw.integers(-most, most + 1, (K // 128, begin[-1]))
    of_b = 2.0 ** draw.integers(-most, most + 1, (len(ROWS), K // 128, n // 128))
    exact = np.zeros((first[-1], n))
    for expert, count in enumerate(ROWS):
        mine = slice(first[expert], first[expert + 1])
        rows = of_a[:, begin[expert] : begin[expert] + count].T.repeat(128, 1)
        columns = of_b[expert].T.repeat(128, 0).repeat(128, 1)
        exact[mine] = (a[mine] * rows) @ (b[expert] * columns).T
    fp8 = [torch.tensor(one, dtype=torch.float32).to(torch.float8_e4m3fn) for one in (a, b)]
    scales = [torch.tensor(one, dtype=torch.float32) for one in (of_a, of_b)]
    return (fp8[0], scales[0], fp8[1], scales[1]), exact


def mx_case(
    torch: Any, draw: Any, n: int, grains: tuple[int, int], *, adds: bool
) -> tuple[Any, Any]:
    """The same of MXFP8 x MXFP4: scales of ``grains`` values are powers of two, four in a word."""
    first, begin = rows_of()
    a, b = draw.integers(-4, 5, (first[-1], K)), draw.integers(0, 16, (len(ROWS), n, K))
    a, b = (rows_to_add(draw, first[-1]), b // 2 * 2 % 14) if adds else (a, b)
    most = 0 if adds else 2
    powers = [
        draw.integers(-most, most + 1, (K // grains[0], begin[-1])),
        draw.integers(-most, most + 1, (len(ROWS), K // grains[1], n)),
    ]
    exact = np.zeros((first[-1], n))
    for expert, count in enumerate(ROWS):
        mine = slice(first[expert], first[expert + 1])
        rows = powers[0][:, begin[expert] : begin[expert] + count].T.repeat(grains[0], 1)
        columns = powers[1][expert].T.repeat(grains[1], 1)
        exact[mine] = (a[mine] * 2.0**rows) @ (E2M1[b[expert]] * 2.0**columns).T
    words = []
    for one in powers:
        codes = np.moveaxis((one + 127).astype(np.uint8), -2, -1)
        words.append(np.moveaxis(np.ascontiguousarray(codes).view(np.int32), -1, -2))
    given = torch.tensor(a, dtype=torch.float32).to(torch.float8_e4m3fn)
    packed = torch.tensor((b[..., ::2] | b[..., 1::2] << 4).astype(np.uint8))
    scales = [torch.tensor(np.ascontiguousarray(one)) for one in words]
    return (given, scales[0], packed, scales[1]), exact


def activated(products: Any) -> Any:
    """SwiGLU of exact products, whose first half of columns is up, and the second the gate."""
    up, gate = np.split(products, 2, 1)
    return up * gate / (1 + np.exp(-np.clip(gate, -600, None)))


@dataclass(frozen=True)
class Quantised:
    """Rows that a kernel quantised to E4M3, with a scale for 128 values."""

    codes: Any
    scales: Any
    #: the values before
    wanted: Any

    def wrong(self, memory: GlobalMemory) -> int:
        """How many scales and values after a run are not the nearest, or next to it."""
        rows, columns = self.wanted.shape
        values = from_e4m3(self._read(memory, self.codes).reshape(rows, columns)).astype(float)
        kept = self._read(memory, self.scales)
        if self.scales.dtype.is_floating_point:
            table = kept.view(np.float32).reshape(self.scales.shape).astype(float)
        else:  # four exponents in a word
            powers = kept.reshape(*self.scales.shape, 4).transpose(0, 2, 1).astype(float) - 127
            table = 2.0 ** powers.reshape(-1, self.scales.shape[1])
        _, begin = rows_of()
        places = np.concatenate([begin[n] + np.arange(count) for n, count in enumerate(ROWS)])
        scales = table[: columns // 128, places].T
        most = np.maximum(np.abs(self.wanted).reshape(rows, -1, 128).max(-1), 1e-4) / 448
        low, high = most * (1 - 2**-7), most * (1 + 2**-7)
        if not self.scales.dtype.is_floating_point:
            low, high = (2.0 ** np.ceil(np.log2(one)) for one in (low, high))
        spread = scales.repeat(128, 1)
        room = np.abs(self.wanted) * (2**-4 + 2**-7) + spread * 2**-9
        off = np.abs(values * spread - self.wanted) > room
        return int(off.sum()) + int(((scales < low) | (scales > high)).sum())

    @staticmethod
    def _read(memory: GlobalMemory, tensor: Any) -> Any:
        at, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        region = memory.find(at, at + size)
        return region.data[at - region.address :][:size]


@dataclass(frozen=True)
class Launched:
    """The file of a launch, and what its results are judged by, unless by the file."""

    path: Path
    quantised: Quantised | None

    def wrong(self, memory: GlobalMemory) -> int:
        """How many results are wrong."""
        if self.quantised:
            return self.quantised.wrong(memory)
        expected = read_launch(self.path).expected
        assert expected is not None
        return compare(expected.read(memory), expected).wrong

    def shown(self, name: str, mutants: int) -> None:
        """Run it in all schedules, and print what is wrong; and how many mutants are noticed."""
        file = read_launch(self.path)
        program = program_of(file, Path(name))
        races, faults, wrong = set[str](), [], 0
        for schedule in schedules_of(SCHEDULES):
            one = run_once(file, program, schedule, watch=True)
            races |= {f"{race}" for race in one.run.races}
            faults += [one.run.fault] if one.run.fault else []
            wrong = max(wrong, 0 if one.run.fault else self.wrong(one.memory))
        print(f"{name}, grid {file.grid}: {wrong} values wrong, {len(races)} races, "
              f"{len(faults)} faults", flush=True)  # fmt: skip
        print(*sorted(races), *faults, sep="\n", end="\n" if races or faults else "")
        if mutants:
            Subject(name, file, self.wrong).show(mutants)


class Kernel:
    """One of FlashInfer's kernels, with operands."""

    def __init__(self, form: str, kind: str) -> None:
        self.form, self.kind, self.name = form, kind, f"{form}_{kind}"
        self.torch: Any = importlib.import_module("torch")
        self.module: Any = importlib.import_module(f"{PACKAGE}.kernel_moe_{self.name}")
        self.host: Any = importlib.import_module(f"{PACKAGE}.moe_{self.name}")
        on_device(self.module)
        draw, self.adds = np.random.default_rng(3), kind == "fc2_finalize"
        n = 2 * N if "act" in kind else N
        if form == "fp8":
            self.arguments, self.exact = fp8_case(self.torch, draw, n, adds=self.adds)
        else:
            grains = self.module.GRANK_A, self.module.GRANK_B
            self.arguments, self.exact = mx_case(self.torch, draw, n, grains, adds=self.adds)
        self.offsets = self.torch.tensor(rows_of()[0], dtype=self.torch.int32)

    def tactics(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Tiles, and the stores of each where FlashInfer's function has to be told."""
        classes = (one for one in vars(self.host).values() if isinstance(one, type))
        tiles = next(one.TILES for one in classes if hasattr(one, "TILES"))
        every = [(*tile[:2], 128) for tile in tiles]
        if self.kind != "fc1_act_q1":
            return [(tile, {}) for tile in every]
        return [(tile, {"epi": epi}) for tile in every for epi in self.host.epi_tactics(tile)]

    def launched(self, recorder: Any, tile: tuple[int, ...], more: Any, folder: Path) -> Launched:
        """Let FlashInfer's function compile for a tile, and record its launch."""
        torch, rows, wanted = self.torch, len(self.exact), self.exact
        given = [*self.arguments, self.offsets]
        bound, quantised = None, None
        output = torch.full((rows, N), float("nan"), dtype=torch.bfloat16)
        if self.adds:
            tokens = torch.arange(rows, dtype=torch.int32) % TOKENS
            shares = torch.tensor(np.arange(rows) % 2 + 1, dtype=torch.float32)
            wanted = np.zeros((TOKENS, N))
            np.add.at(wanted, tokens.numpy(), self.exact * shares.numpy()[:, None])
            output = torch.zeros((TOKENS, N), dtype=torch.bfloat16)
            given += [tokens, shares]
            more = {**more, "out": output, "num_tokens": TOKENS}
        elif "act" in self.kind:
            wanted = activated(self.exact)
            bound = torch.tensor(np.abs(wanted) * (2**-8 + 2**-16) + 1e-30)
        self.host.torch = SimpleNamespace(**{**vars(torch), "zeros": lambda *_, **__: output})
        if self.kind == "fc1_act_q1":
            shape = self.host.out_sf_shape(rows, N, len(ROWS))
            kind = torch.float32 if self.form == "fp8" else torch.int32
            codes, scales = torch.zeros((rows, N)), torch.full(shape, -1, dtype=kind)
            codes = (codes + float("nan")).to(torch.float8_e4m3fn)
            quantised = Quantised(codes, scales, wanted)
            more, output = {**more, "out_q": codes, "out_sf": scales}, scales.view(torch.bfloat16)
        result = torch.zeros(output.shape) if quantised else torch.tensor(wanted)
        bound = (result.to(torch.bfloat16).double() - result).abs() if bound is None else bound
        recorder.begin(folder)
        recorder.case = SimpleNamespace(
            name=f"{self.name} {tile}", inputs=given, exact=result, output=output,
            bound=torch.zeros(output.shape) if quantised else bound,
        )  # fmt: skip
        call = "moe_gemm" if self.kind == "gemm" else self.kind
        getattr(self.host, f"cute_dsl_sm12x_{call}_{self.form}")(*given, tile=tile, **more)
        recorder.finish_call()
        (only,) = recorder.launches
        return Launched(Path(only["folders"][-1]) / "launch.json", quantised)


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("flashinfer", type=Path)
    for folder in ("torch", "dsl", "work"):
        parser.add_argument(f"--{folder}", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--forms", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--processors", type=int, default=3, help="fewer than there are tiles")
    parser.add_argument("--mutants", type=int, default=0, help="of each kernel, the first tile's")
    given = parser.parse_args()
    recorder, _called = prepare(given)
    for form, kind in product(given.forms, given.only):
        kernel = Kernel(form, kind)
        for number, (tile, more) in enumerate(kernel.tactics()[: 1 if given.mutants else None]):
            name = f"{kernel.name} {tile} {', '.join(str(one) for one in more.values())}"
            into = Path.cwd() / "launches" / f"{kernel.name}-{number}"
            shutil.rmtree(into, ignore_errors=True)
            kernel.launched(recorder, tile, more, into).shown(name, given.mutants)


if __name__ == "__main__":
    main()
