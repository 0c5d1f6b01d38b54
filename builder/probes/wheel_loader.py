"""Registers rebuilt kernels in place of those of an installed vLLM.

vLLM calls ``load`` in every process that it starts, through the entry point group
``vllm.general_plugins``.  If the machine code is not for this device, nothing is
loaded; if it is, any mismatch is an error that stops vLLM: otherwise
the old kernels would be used unnoticed.

In the wheel this is ``__init__.py``, next to ``companion.json``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
logger = logging.getLogger("vllm.spark_build_companion")

Json = dict[str, Any]


class ExtensionWheelError(RuntimeError):
    """The extension wheel does not fit the installed packages, or torch ignores its kernels."""


def facts() -> Json:
    """The facts about the extension wheel."""
    about: Json = json.loads((_HERE / "companion.json").read_text("utf-8"))
    return about


@cache
def load() -> bool:
    """Load the kernels if they are for this device; once in a process.

    Returns whether they are in use.

    Raises:
        ExtensionWheelError: they do not fit, or are not used afterwards.
    """
    about = facts()
    device = capability()
    if device is None or list(device) not in about["capabilities"]:
        shown = f"compute capability {device[0]}.{device[1]}" if device else "no CUDA device"
        logger.info("%s: not loaded: %s", about["name"], shown)
        return False
    register(about, str(_HERE / about["library"]))
    named = ", ".join(operator["name"] for operator in about["operators"])
    logger.info("%s: %s registered anew", about["name"], named)
    return True


def register(about: Json, library: str) -> None:
    """Load the library, and check that torch uses its kernels.

    Raises:
        ExtensionWheelError: another vLLM or torch is installed, an operator is missing, the
            library cannot be loaded, or torch still uses another kernel.
    """
    torch: Any = importlib.import_module("torch")
    name = about["name"]
    _must_be("vllm", importlib.metadata.version("vllm"), about)
    _must_be("torch", torch.__version__, about)
    for module in about["modules"]:
        importlib.import_module(module)
    for row in about["operators"]:
        if not _has_kernel(torch, row["name"], row["key"]):
            problem = f"torch has no {row['name']} for {row['key']}, so there is nothing to replace"
            raise ExtensionWheelError(f"{name}: {problem}")
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        raise ExtensionWheelError(f"{name}: {library} cannot be loaded: {error}") from error
    for row in about["operators"]:
        place = registered_at(torch._C._dispatch_dump(row["name"]), row["key"])
        if about["mark"] not in place:
            problem = f"{row['name']} for {row['key']} is still another kernel: {place!r}"
            raise ExtensionWheelError(f"{name}: {problem}")


def _has_kernel(torch: Any, operator: str, key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))
    except RuntimeError:  # there is no such operator at all
        return False


def registered_at(dump: str, key: str) -> str:
    """Torch's description of the kernel in use for a dispatch key, then of the replaced ones."""
    for line in dump.splitlines():
        if line.startswith((f"{key}:", f"{key}[")):
            return line
    return ""


def _must_be(package: str, installed: str, about: Json) -> None:
    """Compare versions without the local part (``+cu130``)."""
    if installed.partition("+")[0] != about[package]:
        raise ExtensionWheelError(
            f"{about['name']} was built for {package} {about[package]}, and {installed} is "
            "installed: build it again for that, or uninstall it"
        )


def capability() -> tuple[int, int] | None:
    """Compute capability of the first device, asked without starting CUDA in this process."""
    current_platform = importlib.import_module("vllm.platforms").current_platform
    if not current_platform.is_cuda():
        return None
    version = current_platform.get_device_capability()
    return None if version is None else (version[0], version[1])
