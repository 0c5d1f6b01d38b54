"""Compile a change into an extension wheel for a prebuilt vLLM, and print the result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from builder.applier.outcomes import Target
from builder.common.console import console, print_json
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.compile.abi import DISTRIBUTIONS
from builder.compile.build import cost_of_units
from builder.compile.changes import named_change, patched
from builder.compile.command import source_tree
from builder.compile.executor import toolkit_choice
from builder.compile.extensionwheel import PlannedWheel, build_extension_wheel, request_for
from builder.compile.stage import refuse_cpu_torch
from builder.compile.toolchain import find_compiler
from builder.compile.units import Sources
from builder.compile.wheelplan import plan_wheel
from builder.errors import EngineError, UsageError
from builder.images.bases.identify import identify
from builder.images.bases.model import BaseRequest

if TYPE_CHECKING:
    from pathlib import Path

    from builder.compile.changes import SourceChange
    from builder.compile.extensionwheel import WheelReport
    from builder.compile.options import WheelOptions
    from builder.compile.source import SourceTree
    from builder.compile.toolchain import Compiler
    from builder.compile.wheelplan import WheelPlan
    from builder.images.subject import Subject


def compile_wheel(options: WheelOptions) -> None:
    """Build the wheel; its path is the last line of stdout."""
    if bool(options.change) == bool(options.patch):
        raise UsageError(
            "give --change or --patch",
            hint="spark-build compile wheel --vllm 0.19.1 --change sm120-family --dry-run",
        )
    if not options.dry_run:
        _must_be_writable(options.output)
    index = PackageIndex()
    platform = Platform.parse(options.platform or Target.here().platform).oci
    compiler = find_compiler(
        index, platform, options.nvcc, toolkit_choice(options.toolkit, options.builder)
    )
    if options.cuda and options.cuda != compiler.cuda:
        what = compiler.container.image.name if compiler.container else compiler.nvcc
        raise EngineError(
            f"{what} is CUDA {compiler.cuda}, but --cuda says {options.cuda}",
            hint="name the compiler of that toolkit with --nvcc or --toolkit",
        )
    source = source_tree(index, options.vllm, options.source)
    change = _change(source, options)
    plan = plan_wheel(source, change, options.arch_list, compiler.cuda)
    if options.dry_run:
        _say_plan(plan, source, options, compiler)
        return
    ref = Ref(options.base or f"pypi:vllm=={options.vllm}")
    with console.step(f"base {ref}"):
        base = identify(
            BaseRequest(
                ref=ref,
                platform=platform,
                pins={},
                tracked=DISTRIBUTIONS,
                index=index,
            )
        )
    try:
        _must_be_for(base, platform, index)
        request = request_for(
            index,
            base.tree,
            source,
            change,
            compiler,
            arch_list=options.arch_list,
            torch=options.torch,
            jobs=options.jobs,
            plan=plan,
        )
        wheel = build_extension_wheel(request, options.output)
    finally:
        base.close()
    if options.json:
        print_json(wheel.report)
        return
    _say(wheel.report)
    print(wheel.path)


def _must_be_for(base: Subject, platform: str, index: PackageIndex) -> None:
    """Refuse a base for another platform, before minutes of compiling.

    An image for a single platform ignores ``--platform``.
    """
    identity = base.identity
    is_for = identity.platform.oci
    if is_for != platform:
        raise UsageError(
            f"{identity.ref} is for {is_for}, but the compiled code would be for {platform}",
            hint=f"--platform {is_for}",
        )
    packages = identity.packages
    if identity.is_wheels and "torch" in packages:
        target = identity.platform.target
        refuse_cpu_torch(index, packages["torch"], target, packages["vllm"])


def _must_be_writable(out: Path) -> None:
    """Refuse an output folder that cannot be written; create nothing yet."""
    above = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not above.is_dir():
        raise UsageError(f"{out} cannot be a folder because {above} is a file")
    if not os.access(above, os.W_OK):
        raise UsageError(f"{above} cannot be written to", hint="name another folder with -o")


def _change(source: SourceTree, options: WheelOptions) -> SourceChange:
    sources = Sources(source.root)
    if options.patch:
        return patched(sources, options.patch)
    return named_change(sources, options.change or "")


def _say_plan(
    plan: WheelPlan, source: SourceTree, options: WheelOptions, compiler: Compiler
) -> None:
    paths = [unit.path for unit in (*plan.rebuilt, *plan.siblings)]
    cost = cost_of_units(paths, jobs=compiler.at_once(options.jobs))
    if options.json:
        print_json(PlannedWheel.of(plan, source.version, cost.jobs))
        return
    print(f"operators: {', '.join(operator.name for operator in plan.operators)}")
    for unit in plan.rebuilt:
        print(f"  rebuilt   {unit.path}")
    for unit in plan.siblings:
        print(f"  between   {unit.path}")
    print(cost.brief)


def _say(report: WheelReport) -> None:
    about, abi, kernels = report.companion, report.abi, report.companion.kernels
    counted = [f"{number} x {name}" for name, number in kernels.instructions.items()]
    if kernels.writing:
        counted.append(f"{kernels.writing} write to memory")
    if kernels.from_ptx:
        counted.append(f"{kernels.from_ptx} from PTX")
    as_released = kernels.as_released
    counted.append(f"{len(as_released)} like those of the release" if as_released else "no trap")
    print(f"{about.name} for vllm {about.vllm}, torch {about.torch}")
    print(f"  operators   {', '.join(operator.name for operator in about.operators)}")
    print(f"  kernels     {', '.join(counted) if kernels.by_target else 'none'}")
    print(f"  runs on     {', '.join(f'{a}.{b}' for a, b in about.capabilities)}")
    symbols = ", ".join(f"{number} of {name}" for name, number in abi.symbols.items())
    print(f"  symbols     {symbols}: all found")
    versions = ", ".join(f"{name} {version}" for name, version in abi.newest_versions.items())
    print(f"  requires    {versions}; CUDA runtime {about.cuda_runtime}")
