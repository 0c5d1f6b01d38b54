"""FlashInfer's SM12x kernels for FP8 and MXFP8 x MXFP4 experts (CuTe DSL), in the executor.

    python -m benchmarks.sm12x_moe FLASHINFER --torch TORCH --dsl DSL --work WORK

FLASHINFER is the package of a wheel; in TORCH and DSL is what ``pip install --target`` put there
(torch; nvidia-cutlass-dsl 4.8.0 with cuda-bindings).  FlashInfer's own functions
(``cute_dsl_sm12x_moe_gemm_*``) choose the tile's stages and the store, compile, and launch; the
launch is recorded as level ``numbers`` does, and run on exact operands.  No GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from builder.probes import launch_host, launch_probe
from builder.ptx.launchfile import read_launch
from builder.ptx.machine import E2M1
from builder.ptx.runs import program_of, run_once, schedules_of

PACKAGE = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x"
#: What the modules import of FlashInfer, beside themselves.
ABSENT = ("flashinfer.utils", "flashinfer.autotuner", "flashinfer.api_logging")
TILES = ((128, 128, 128), (64, 128, 128), (32, 128, 128), (8, 128, 128))
SCHEDULES = ("eager", "lazy", "random:1", "random:2")
#: Rows of each expert, columns, depth, and multiprocessors: fewer than tiles.
ROWS, N, K, PROCESSORS = (40, 0, 1, 150), 256, 512, 3


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
        multi_processor_count=PROCESSORS, major=12, minor=1
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


def fp8_case(torch: Any, draw: Any) -> tuple[Any, Any]:
    """Arguments of the FP8 GEMM, a scale for 1x128 and 128x128 values, and the exact result."""
    first, begin = rows_of()
    a, b = draw.integers(-4, 5, (first[-1], K)), draw.integers(-4, 5, (len(ROWS), N, K))
    of_a = 2.0 ** draw.integers(-2, 3, (K // 128, begin[-1]))
    of_b = 2.0 ** draw.integers(-2, 3, (len(ROWS), K // 128, N // 128))
    exact = np.zeros((first[-1], N))
    for expert, count in enumerate(ROWS):
        mine = slice(first[expert], first[expert + 1])
        rows = of_a[:, begin[expert] : begin[expert] + count].T.repeat(128, 1)
        columns = of_b[expert].T.repeat(128, 0).repeat(128, 1)
        exact[mine] = (a[mine] * rows) @ (b[expert] * columns).T
    fp8 = [torch.tensor(one, dtype=torch.float32).to(torch.float8_e4m3fn) for one in (a, b)]
    scales = [torch.tensor(one, dtype=torch.float32) for one in (of_a, of_b)]
    return (fp8[0], scales[0], fp8[1], scales[1]), exact


def mx_case(torch: Any, draw: Any, grains: tuple[int, int]) -> tuple[Any, Any]:
    """The same of MXFP8 x MXFP4: scales of ``grains`` values are powers of two, four in a word."""
    first, begin = rows_of()
    a, b = draw.integers(-4, 5, (first[-1], K)), draw.integers(0, 16, (len(ROWS), N, K))
    powers = [
        draw.integers(-2, 3, (K // grains[0], begin[-1])),
        draw.integers(-2, 3, (len(ROWS), K // grains[1], N)),
    ]
    exact = np.zeros((first[-1], N))
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


def launched(recorder: Any, name: str, tile: tuple[int, ...], work: Path) -> Path:
    """The file of a GEMM's launch."""
    torch: Any = importlib.import_module("torch")
    kernel: Any = importlib.import_module(f"{PACKAGE}.kernel_moe_{name}")
    host: Any = importlib.import_module(f"{PACKAGE}.moe_{name}")
    draw = np.random.default_rng(3)
    fp8 = name.startswith("fp8")
    arguments, exact = (
        fp8_case(torch, draw) if fp8 else mx_case(torch, draw, (kernel.GRANK_A, kernel.GRANK_B))
    )
    offsets = torch.tensor(rows_of()[0], dtype=torch.int32)
    output = torch.full((int(offsets[-1]), N), float("nan"), dtype=torch.bfloat16)
    host.torch = SimpleNamespace(**{**vars(torch), "zeros": lambda *_, **__: output})
    wanted = torch.tensor(exact)
    recorder.begin(work / f"{name}-{'x'.join(map(str, tile))}")
    recorder.case = SimpleNamespace(
        name=f"{name} {tile}", inputs=[*arguments, offsets], exact=wanted, output=output,
        bound=(wanted.to(torch.bfloat16).double() - wanted).abs(),
    )  # fmt: skip
    call = "fp8" if fp8 else "mxfp8_mxfp4"
    getattr(host, f"cute_dsl_sm12x_moe_gemm_{call}")(*arguments, offsets, tile=tile, tune=False)
    recorder.finish_call()
    (only,) = recorder.launches
    return Path(only["folders"][-1]) / "launch.json"


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("flashinfer", type=Path)
    for folder in ("torch", "dsl", "work"):
        parser.add_argument(f"--{folder}", type=Path, required=True)
    given = parser.parse_args()
    recorder, _called = prepare(given)
    for name in ("fp8_gemm", "mxfp8_mxfp4_gemm"):
        on_device(importlib.import_module(f"{PACKAGE}.kernel_moe_{name}"))
        for tile in TILES:
            file = read_launch(launched(recorder, name, tile, Path.cwd() / "launches"))
            program = program_of(file, Path(name))
            races, faults, wrong = set[str](), [], 0
            for schedule in schedules_of(SCHEDULES):
                one = run_once(file, program, schedule, watch=True).run
                races |= {f"{race}" for race in one.races}
                faults += [one.fault] if one.fault else []
                wrong = max(wrong, one.wrong or 0)
            print(f"{name} {tile}, grid {file.grid}: {wrong} values wrong, {len(races)} races, "
                  f"{len(faults)} faults", flush=True)  # fmt: skip
            print(*sorted(races), *faults, sep="\n", end="\n" if races or faults else "")


if __name__ == "__main__":
    main()
