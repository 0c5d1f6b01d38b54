"""The inputs of an extension wheel, and how to find them for a base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.compile.base import InstalledLibraries
from builder.compile.toolchain import header_version, make_toolchain, torch_headers
from builder.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from builder.applier.trees import Tree
    from builder.compile.changes import SourceChange
    from builder.compile.compiler import Compiler
    from builder.compile.registration import Operator
    from builder.compile.source import SourceTree
    from builder.compile.toolchain import Toolchain
    from builder.compile.wheelplan import WheelPlan
    from builder.pypi.index import PackageIndex


@dataclass(frozen=True, kw_only=True)
class WheelRequest:
    """The inputs of an extension wheel.

    ``source`` and ``change`` are vLLM's sources and their changes; ``arch_list`` is the
    ``TORCH_CUDA_ARCH_LIST`` of the build; ``tools`` are nvcc and the headers of
    the base's torch; ``base`` loads the extension wheel.  ``operators`` and
    ``platform`` are determined if not given.
    """

    source: SourceTree
    change: SourceChange
    arch_list: str
    tools: Toolchain
    base: InstalledLibraries
    operators: tuple[Operator, ...] = ()
    #: platform of the wheel, such as ``linux_aarch64``; empty means that of the base's vLLM
    platform: str = ""
    jobs: int | None = None
    #: the plan from ``plan_wheel``, if it was already made
    plan: WheelPlan | None = None


def request_for(
    index: PackageIndex,
    tree: Tree,
    source: SourceTree,
    change: SourceChange,
    compiler: Compiler,
    *,
    arch_list: str = "12.1a",
    torch: Path | None = None,
    jobs: int | None = None,
    plan: WheelPlan | None = None,
) -> WheelRequest:
    """A request for a base, with a compiler and the headers of the base's torch.

    Args:
        index: the package index for headers.
        tree: site-packages of the base; it must have been identified with the distributions of
            ``builder.compile.base.DISTRIBUTIONS`` tracked.
        source: vLLM's sources of the base's release.
        change: the change.
        compiler: from ``find_compiler``.
        arch_list: ``TORCH_CUDA_ARCH_LIST`` of the build.
        torch: a site-packages with torch's headers; None means those of the base's release.
        jobs: units to compile in parallel; None means by memory.
        plan: from ``plan_wheel`` for the same inputs.

    Raises:
        EngineError: the compiler does not run here, or has no CUDA runtime to link.
        UsageError: the base has another vLLM version, or the headers are from another torch.
        RemoteError: the package index does not answer.
    """
    compiler.ready(index)
    base = InstalledLibraries(tree, compiler.libraries)
    tools = make_toolchain(index, torch or torch_headers(index, base.version("torch")), compiler)
    agreed_torch(base, source.version, tools)
    return WheelRequest(
        source=source,
        change=change,
        arch_list=arch_list,
        tools=tools,
        base=base,
        jobs=jobs,
        plan=plan,
    )


def agreed_torch(base: InstalledLibraries, vllm: str, tools: Toolchain) -> str:
    """The base's torch version; checks the base's vLLM and the headers' torch version.

    Raises:
        UsageError: they differ.
    """
    installed = base.version("vllm")
    if installed != vllm.partition("+")[0]:
        raise UsageError(f"the base has vllm {installed}, but the sources are those of {vllm}")
    torch = base.version("torch")
    headers = header_version(tools)
    if torch.split(".")[:2] != headers.split(".")[:2]:
        raise UsageError(
            f"the base has torch {torch}, but the headers are those of {headers}; the compiled "
            f"code may not load there",
            hint="leave --torch out, or name a site-packages with that torch",
        )
    return torch
