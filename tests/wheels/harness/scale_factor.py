"""Marlin's factor for the scales of NVFP4 weights, by a release's own code on a CPU.

    python scale_factor.py RUNTIME FILE

Prints one JSON object: the factor for each case, and the peak memory for the scales of many experts
as a multiple of their bytes.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

FUNCTION = "_nvfp4_compute_scale_factor"
#: Experts, and the rows and groups of one.
MANY = (96, 1024, 128)


def released(path: str) -> Any:
    """The function of a file; it needs torch alone, and importing vLLM takes a GPU's libraries."""
    tree = ast.parse(Path(path).read_text("utf-8"))
    (found,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    )
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([found], []), path, "exec"), names)
    return names[FUNCTION]


def cases() -> dict[str, Any]:
    """Scales of one layer, or of all experts of one: what a checkpoint may have, and what not."""
    torch.manual_seed(7)
    made: dict[str, Any] = {}
    for name, shape in (("layer", (64, 16)), ("experts", (5, 64, 16))):
        for dtype in (torch.bfloat16, torch.float32, torch.half):
            for power in (-40, -9, -1, 0, 4, 9):
                values = torch.rand(shape).mul(2.0**power).to(dtype)
                made[f"{name} {dtype} 2^{power}"] = values
            made[f"{name} {dtype} zero"] = torch.zeros(shape, dtype=dtype)
    some = torch.rand(5, 64, 16).to(torch.bfloat16)
    some[1] = 0
    made["an expert of zeros"] = some
    made["negative"] = -some
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        made[name] = some.clone()
        made[name][2, 3, 4] = value
    made["no experts"] = some[:0]
    return made


def peak(factor: Any) -> float:
    """The memory that it takes beside the scales, as a multiple of their bytes."""
    scales = torch.rand(MANY, dtype=torch.bfloat16)
    reading, writing = os.pipe()
    if os.fork() == 0:
        scales.max()  # its pages, and those of the code, count for this process from here on
        factor(scales[:1], torch.bfloat16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        factor(scales, torch.bfloat16)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, str(grown * 1024).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        grown = int(pipe.read())
    os.wait()
    return grown / (scales.numel() * scales.element_size())


def main() -> None:
    """Answer for one file."""
    torch.set_num_threads(1)
    factor = released(sys.argv[2])
    answers = {name: factor(scales, torch.bfloat16) for name, scales in cases().items()}
    answers["half"] = factor(torch.rand(8, 4), torch.half)
    print(json.dumps({"factors": answers, "peak": peak(factor)}))


if __name__ == "__main__":
    main()
