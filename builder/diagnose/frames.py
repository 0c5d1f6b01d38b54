"""The place where a program failed, as a search phrase."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.diagnose.tracebacks import Frame

#: Packages where the cause is likely, then packages that only forward calls.
_OWN = (
    "vllm",
    "flashinfer",
    "sglang",
    "tensorrt_llm",
    "transformers",
    "cutlass",
    "nvidia_cutlass_dsl",
    "triton",
    "deep_gemm",
    "compressed_tensors",
    "huggingface_hub",
    "safetensors",
    "tvm_ffi",
    "ray",
)
#: Folders of generated code, which are below folders with a package's name.
_COMPILED = (".cache", "torch_compile_cache", "inductor_cache", ".triton")
_CARRIERS = ("torch", "pydantic", "uvloop", "asyncio", "contextlib", "multiprocessing", "importlib")
_INSTALLED = re.compile(r".*?(?:site-packages|dist-packages|lib/python3\.\d+)/")


def _short(path: str) -> str:
    """A path from its package on."""
    short = _INSTALLED.sub("", path)
    parts = short.split("/")
    starts = [
        at
        for at, part in enumerate(parts[:-1])
        if part in _OWN and parts[at + 1] not in ("python", "src")
    ]
    return "/".join(parts[starts[0] :]) if starts and short.startswith("/") else short


def _within(path: str, packages: Sequence[str]) -> bool:
    parts = _short(path).split("/")
    return not any(p in _COMPILED for p in parts) and any(p in packages for p in parts)


def failure_location(frames: Sequence[Frame]) -> str:
    """The innermost relevant frame."""
    inner = [f for f in reversed(frames) if not f.path.startswith("<")]
    for choice in (
        [f for f in inner if _within(f.path, _OWN) and not _within(f.path, ("uvloop",))],
        [f for f in inner if not _within(f.path, _CARRIERS)],
        inner,
    ):
        if choice:
            first = choice[0]
            where = f", in {first.where}" if first.where else ""
            return f"{_short(first.path)}, line {first.line}{where}"
    return ""


_VARIABLE = (
    (re.compile(r"\S*/\S+"), " "),  # paths and addresses
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{12,}\b|\b[0-9a-f]{6,}(?:-[0-9a-f]{4,})+"), " "),
    (re.compile(r"\(pid=\d+\)|\[\d+\]"), " "),
    (re.compile(r"\b\d[\d.,:]{3,}\b"), " "),
    (re.compile(r"[\"'`\[\]{}()<>|=,]+|\.(?=\s|$)|:(?=\s|$)"), " "),
)


def search_phrase(engine: str, name: str, text: str, frame: str = "") -> str:
    """A search phrase for issue trackers: the constant words of a message."""
    for regex, put in _VARIABLE:
        text = regex.sub(put, text)
    words = [word for word in text.split() if word not in ("-", "--", ":", "#")]
    found = words[:12]
    if name and name[:1].isupper() and not any(name in word for word in found):
        found.insert(0, name)
    if len(found) < 5 and frame:
        found += [frame.partition(",")[0].rpartition("/")[2], frame.partition(", in ")[2]]
    first = {"": "", "nim": "NIM", "tensorrt-llm": "TensorRT-LLM"}.get(engine, engine)
    return " ".join(word for word in (first, *found) if word)
