"""vLLM's Triton kernels of experts and of attention, for SM121, in the executor.

    python -m benchmarks.triton_kernels VLLM

VLLM is the folder ``vllm`` of a release's wheel; Triton must be importable, and needs no GPU.  The
kernels are those of the release, without the host code around them.  Prints for each how many
values are outside of their bounds, the races, and how many barriers nothing notices if left out.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.ptx.api import run

MOE = "model_executor/layers/fused_moe/fused_moe.py"
ATTENTION = "v1/attention/ops/triton_unified_attention.py"
HELPERS = "v1/attention/ops/triton_attention_helpers.py"
TRITON = "import triton\nimport triton.language as tl\n"
#: Values of vLLM's modules that the kernels name.
NAMES = """
class float8_info:
    min, max = -448.0, 448.0
is_batch_invariant = False
MAX_3D_QUERY_LEN = 8
"""
WARPS = 4


@dataclass(frozen=True)
class Case:
    """A compiled kernel, its launch, and the valid values of one of its arrays."""

    ptx: str
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    shared: int
    output: Any
    exact: Any
    bound: Any


def lay_out(vllm: Path, into: Path) -> None:
    """Write modules with the release's kernels, which import nothing of vLLM."""
    kernels = r"^@triton\.jit\ndef \w+\(.*?(?=^(?:@|def |class |\w))"
    for name, path in (("moe", MOE), ("attention", ATTENTION)):
        text = (vllm / path).read_text("utf-8")
        found = re.search(r"triton_attention_helpers (import \([^)]*\))", text)
        helpers = f"from helpers {found[1]}\n" if found else ""
        parts = re.findall(kernels, text, re.MULTILINE | re.DOTALL)
        (into / f"{name}.py").write_text("\n\n".join((TRITON + helpers + NAMES, *parts)), "utf-8")
    text = (vllm / HELPERS).read_text("utf-8")
    text = text.replace("from vllm.triton_utils import tl, triton\n", TRITON)
    (into / "helpers.py").write_text(text, "utf-8")


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """A kernel for SM121; what has neither a type nor a constant has its default."""
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    names, defaults = kernel.arg_names, inspect.signature(kernel.fn).parameters
    fixed = {
        (n,): constants[name] if name in constants else defaults[name].default
        for n, name in enumerate(names)
        if name not in types
    }
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(names)
        if types.get(name) in ("*bf16", "i64")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = compiler.ASTSource(kernel, signature, fixed, aligned)
    target = backends.GPUTarget("cuda", 121, 32)
    return compiler.compile(source, target=target, options={"num_warps": WARPS, "num_stages": 3})


def bits(values: Any) -> Any:
    """Values rounded to bfloat16."""
    words = np.asarray(values, np.float32).view(np.uint32)
    return ((words + ((words >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


def values_of(halves: Any) -> Any:
    """bfloat16 as float32."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def experts() -> Case:
    """8 tokens, 2 of 4 experts each: every sum is exact, and rounded once."""
    language: Any = importlib.import_module("triton.language")
    kernel = importlib.import_module("moe").fused_moe_kernel
    count, tokens, depth, columns, top_k, rows = 4, 8, 64, 128, 2, 16
    pointers = ("a_ptr", "b_ptr", "c_ptr")
    routes = ("sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr")
    numbers = (
        "N",
        "K",
        "EM",
        "num_valid_tokens",
        "stride_am",
        "stride_be",
        "stride_bn",
        "stride_cm",
    )
    types = {
        **dict.fromkeys(pointers, "*bf16"), "topk_weights_ptr": "*fp32",
        **dict.fromkeys(routes, "*i32"), **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    constants = {
        **dict.fromkeys((n for n in kernel.arg_names if n.startswith("stride_")), 0),
        **dict.fromkeys(("stride_ak", "stride_bk", "stride_cn", "SPLIT_K"), 1),
        **dict.fromkeys(("b_bias_ptr", "a_scale_ptr", "b_scale_ptr")),
        **dict.fromkeys(
            (n for n in kernel.arg_names if n.startswith(("use_", "USE_", "HAS_"))), False
        ),
        **dict.fromkeys(("naive_block_assignment", "per_channel_quant", "SWAP_AB"), False),
        "group_n": 0, "group_k": 0, "BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 8, "MUL_ROUTED_WEIGHT": True, "top_k": top_k,
        "compute_type": language.bfloat16,
    }  # fmt: skip
    made = compiled(kernel, types, constants)
    draw = np.random.default_rng(0)
    a = draw.integers(-4, 5, (tokens, depth)).astype(np.float32)
    b = draw.integers(-4, 5, (count, columns, depth)).astype(np.float32)
    chosen = np.stack([draw.permutation(count)[:top_k] for _ in range(tokens)]).reshape(-1)
    order: list[int] = []
    owners: list[int] = []
    for expert in range(count):
        own = [*np.flatnonzero(chosen == expert).tolist()]
        own += [tokens * top_k] * (-len(own) % rows)
        order += own
        owners += [expert] * (len(own) // rows)
    out = np.zeros((tokens * top_k, columns), np.uint16)
    given: dict[str, Any] = dict(zip(pointers, (bits(a), bits(b), out), strict=True))
    given |= {
        "topk_weights_ptr": np.full((tokens, top_k), 0.5, np.float32),
        "sorted_token_ids_ptr": np.array(order, np.int32),
        "expert_ids_ptr": np.array(owners, np.int32),
        "num_tokens_post_padded_ptr": np.array([len(order)], np.int32),
        "N": columns, "K": depth, "EM": len(order), "num_valid_tokens": tokens * top_k,
        "stride_am": depth, "stride_be": columns * depth, "stride_bn": depth, "stride_cm": columns,
    }  # fmt: skip
    exact = np.stack([b[chosen[n]] @ a[n // top_k] * 0.5 for n in range(tokens * top_k)])
    grid = (len(owners) * (columns // 64),)
    bound = np.abs(exact) * 2.0**-9
    return Case(
        made.asm["ptx"], "fused_moe_kernel", grid, given, made.metadata.shared, out, exact, bound
    )


def attention() -> Case:
    """Two sequences in a paged cache, the first with earlier tokens; 4 query heads a key head."""
    kernel = importlib.import_module("attention").kernel_unified_attention
    heads, groups, size, page, rows = 8, 2, 64, 16, 16
    lengths, queries = np.array([37, 20], np.int32), (5, 20)
    starts = np.array([0, 5, 25], np.int32)
    strides = {
        "block_table_stride": 4, "query_stride_0": heads * size, "query_stride_1": size,
        "output_stride_0": heads * size, "output_stride_1": size,
        **{f"stride_{one}_cache_{n}": value for one in "kv"
           for n, value in enumerate((page * groups * size, groups * size, size))},
    }  # fmt: skip
    arrays = ("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr")
    lists = ("block_tables_ptr", "seq_lens_ptr", "query_start_len_ptr")
    types = {**dict.fromkeys(arrays, "*bf16"), **dict.fromkeys(lists, "*i32"), "scale": "fp32",
             "num_seqs": "i32", **dict.fromkeys(strides, "i64")}  # fmt: skip
    absent = [n for n in kernel.arg_names if n.endswith("_ptr") and n not in types]
    constants = {
        **dict.fromkeys((n for n in kernel.arg_names if n.startswith("USE_")), False),
        **dict.fromkeys((*absent, "q_scale", "k_scale", "v_scale", "out_scale")),
        **dict.fromkeys(("qq_bias_stride_0", "SLIDING_WINDOW", "MAX_MM_RANGES", "R_SWA_WINDOW"), 0),
        "softcap": 0.0, "num_query_heads": heads, "num_queries_per_kv": heads // groups,
        "BLOCK_SIZE": page, "TILE_SIZE": 32, "HEAD_SIZE": size, "HEAD_SIZE_PADDED": size,
        "USE_CAUSAL": True, "stride_k_cache_3": 1, "stride_v_cache_3": 1, "BLOCK_M": rows,
        "BLOCK_Q": rows * groups // heads, "NUM_SEGMENTS_PER_SEQ": 1, "IS_3D": False,
    }  # fmt: skip
    made = compiled(kernel, types, constants)
    draw, scale = np.random.default_rng(0), size**-0.5
    q = bits(draw.standard_normal((sum(queries), heads, size)))
    keys, values = (bits(draw.standard_normal((8, page, groups, size))) for _ in range(2))
    table = np.array([[5, 2, 7, 0], [1, 6, 3, 0]], np.int32)
    out = np.zeros(q.shape, np.uint16)
    given: dict[str, Any] = dict(zip(arrays, (out, q, keys, values), strict=True))
    given |= dict(zip(lists, (table, lengths, starts), strict=True))
    given |= {"scale": float(scale), "num_seqs": 2, **strides}
    exact = np.zeros(q.shape)
    for sequence, many in enumerate(queries):
        length = int(lengths[sequence])
        k, v = (
            np.concatenate([values_of(one[n]) for n in table[sequence]])[:length]
            for one in (keys, values)
        )
        for n in range(many):
            seen = length - many + n + 1
            for head in range(heads):
                row, group = int(starts[sequence]) + n, head * groups // heads
                scores = k[:seen, group] @ values_of(q[row, head]) * scale
                weights = np.exp(scores - scores.max())
                exact[row, head] = weights @ v[:seen, group] / weights.sum()
    given = {name: given[name] for name in kernel.arg_names if name in given}
    grid = (sum(queries) // (rows * groups // heads) + 2, groups)
    # the weights are rounded to bfloat16 before the second product, and the result once more
    bound = 2.0**-6 * np.maximum(1, np.abs(exact))
    name = "kernel_unified_attention"
    return Case(made.asm["ptx"], name, grid, given, made.metadata.shared, out, exact, bound)


def judged(case: Case, ptx: str, *schedules: str) -> tuple[int, list[str], list[str]]:
    """Wrong values, races and faults."""
    head = ptx.partition(f".entry {case.kernel}")[2].partition(")")[0]
    scratch = {f"scratch {n}": 0 for n in range(head.count(".param") - len(case.arguments))}
    case.output[...] = 0x7FC0
    result = run(ptx, case.kernel, case.grid, 32 * WARPS, {**case.arguments, **scratch},
                 shared=case.shared, schedules=schedules)  # fmt: skip
    found = values_of(result[case.output]) if not result.faults else np.full(1, np.nan)
    wrong = int((~(np.abs(found - case.exact) <= case.bound)).sum())
    return wrong, [str(race) for race in result.races], [str(fault) for fault in result.faults]


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("vllm", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lay_out(options.vllm, Path(folder))
        sys.path.insert(0, folder)
        for make in (experts, attention):
            case = make()
            wrong, races, faults = judged(case, case.ptx)
            barriers = [*re.finditer(r"bar\.sync\s+0;", case.ptx)]
            unnoticed = sum(
                not any(judged(case, f"{case.ptx[: one.start()]}{case.ptx[one.end() :]}", "eager"))
                for one in barriers
            )
            print(
                f"{case.kernel}: {wrong} of {case.exact.size} values wrong, {len(races)} races, "
                f"{len(faults)} faults; {unnoticed} of {len(barriers)} barriers can be left out"
            )
            print(*races[:3], *faults[:3], sep="\n", end="")


if __name__ == "__main__":
    main()
