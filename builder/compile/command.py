"""The ``compile`` commands: show or compile parts of a release's CUDA sources, or build a wheel."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from builder.applier.states import Target
from builder.common.console import console, print_json
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.compile.build import CompiledUnit, compile_units
from builder.compile.changes import named_change, patched
from builder.compile.costs import Cost, cost_of_units
from builder.compile.extensionwheel import PlannedWheel, build_extension_wheel, request_for
from builder.compile.plans import (
    CompiledRelease,
    CompileRun,
    UnitRow,
    operator_rows,
    outcome,
    plan_wheel,
    runs_on_gb10,
    sm12x_units,
)
from builder.compile.sources import Sources, SourceTree, source_of, touched
from builder.compile.stage import refuse_cpu_torch, with_libraries
from builder.compile.toolchain import find_compiler, make_toolchain, pinned_torch, torch_headers
from builder.compile.toolkit import toolkit_choice
from builder.errors import EngineError, Exit, SparkBuildError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.compile.changes import SourceChange
    from builder.compile.extensionwheel import WheelReport
    from builder.compile.options import ChangeOptions, RunOptions, ShowOptions, WheelOptions
    from builder.compile.plans import Outcome, Row, WheelPlan
    from builder.compile.sources import Unit
    from builder.compile.toolchain import Compiler
    from builder.images.subject import Subject


def source_tree(index: PackageIndex, vllm: str, source: Path | None) -> SourceTree:
    """The released source, the source of the commit in the version, or a folder from the user."""
    if source is not None and not (source / "CMakeLists.txt").is_file():
        raise UsageError(f"{source} has no CMakeLists.txt, so it is not vLLM's source")
    if source is not None:
        return SourceTree(root=source, version=vllm)
    with console.step(f"source of vllm {vllm}"):
        return source_of(index, vllm)


def show_build(options: ShowOptions) -> None:
    """Print what a build would compile, for which architectures, and whether SM121 runs it."""
    result = outcome(
        source_tree(PackageIndex(), options.vllm, options.source),
        options.arch_list,
        options.cuda,
        options.changed,
    )
    rows = operator_rows(result.source, result.recipe) if options.operators else []
    if options.json:
        rebuild = map(UnitRow.of, result.units)
        print_json(
            CompiledRelease.of(result, rebuild, operators=rows if options.operators else None)
        )
        return
    if options.operators:
        _show_operators(result, rows)
        return
    recipe = result.recipe
    asked = f"TORCH_CUDA_ARCH_LIST={recipe.arch_list}, CUDA {recipe.cuda}"
    print(f"vllm {result.source.version}, {asked}")
    print(f"  its build keeps   {', '.join(recipe.archs) or 'nothing'}")
    for unit in sm12x_units(recipe):
        print(f"  {unit.path}")
        print(f"      {_targets(unit)}")
        for guard, where in result.dead.get(unit.path, {}).items():
            print(f"      DEAD on SM121: {guard} in {where.rsplit('/', 1)[-1]}")
    if result.changed:
        _show_rebuild(result)


def _show_operators(result: Outcome, rows: list[Row]) -> None:
    for row in rows:
        print(f"{row.extension}: {row.path}")
        for operator in row.operators:
            print(f"    {operator.name} for {operator.key}")
        for path in row.between:
            print(f"    together with {path}")
        if row.refused:
            print(f"    REFUSED: {row.refused}")
    replaceable = sum(not row.refused for row in rows)
    print(
        f"vllm {result.source.version}: of {len(rows)} CUDA units, {replaceable} can be replaced "
        f"in a prebuilt vLLM; {len(rows) - replaceable} need their whole extension compiled"
    )


def _show_rebuild(result: Outcome) -> None:
    share = f"{len(result.units)} of {len(result.recipe.units)} units"
    print(f"  a change to {', '.join(result.changed)} rebuilds {share}:")
    for unit in result.units:
        print(f"      {unit.extension}: {unit.path}")


def _targets(unit: Unit) -> str:
    named = ", ".join(real for _, real in unit.gencodes)
    fits = any(runs_on_gb10(real) for _, real in unit.gencodes)
    arch = ", ".join(str(number) for number in unit.cuda_arch)
    return f"{named} (__CUDA_ARCH__ {arch}): {'loads' if fits else 'does NOT load'} on SM121"


def compile_change(options: RunOptions) -> None:
    """Compile the units that a change affects, and read their machine code; exit 5 for a trap."""
    if sum(map(bool, (options.change, options.patch, options.unit))) != 1:
        raise UsageError(
            "give one of --change, --patch or --unit",
            hint="spark-build compile run --vllm 0.19.1 --change sm120-family --dry-run",
        )
    index = PackageIndex()
    tree = source_tree(index, options.vllm, options.source)
    platform = Platform.parse(options.platform or Target.here().platform).oci
    compiler = find_compiler(
        index, platform, options.nvcc, toolkit_choice(options.toolkit, options.builder)
    )
    build = outcome(tree, options.arch_list, compiler.cuda)
    sources = Sources(tree.root, build.recipe.generated)
    change = None if options.unit else _change(sources, options)
    if change is not None and not change.texts:
        upstream = f" (upstream since {change.upstream})" if change.upstream else ""
        raise SparkBuildError(
            f"vllm {tree.version} has {change.name} already{upstream}: nothing to compile",
            Exit.NOTHING_TO_DO,
        )
    units = _units(sources, build, change, options.unit)
    if options.dry_run:
        cost = cost_of_units([unit.path for unit in units], jobs=compiler.at_once(options.jobs))
        _say_plan(build, units, cost, json=options.json)
        return
    torch = options.torch or torch_headers(index, pinned_torch(tree.root))
    tools = make_toolchain(index, torch, compiler)
    with console.step(f"compile {len(units)} of {len(build.recipe.units)} units"):
        built = compile_units(sources, build.recipe, units, change, tools, options.jobs)
    rows = tuple(map(CompiledUnit.of, built))
    traps = [row.path for row in rows if row.shows_trap]
    if options.json:
        print_json(CompileRun(vllm=tree.version, units=rows, passed=not traps))
    else:
        for row in rows:
            print(f"{row.path}  {row.seconds:.0f} s")
            for code in row.code:
                counted = ", ".join(f"{number} x {name}" for name, number in code.tensor.items())
                print(f"    {code.target}: {code.verdict}{f': {counted}' if counted else ''}")
            print(f"    {row.object}")
    if traps:
        raise SparkBuildError(
            f"{', '.join(traps)}: compiled for {options.arch_list}, every kernel is a trap",
            Exit.VERIFY_FAILED,
            hint="--change sm120-family",
        )


def _change(sources: Sources, options: ChangeOptions) -> SourceChange:
    if options.patch:
        return patched(sources, options.patch)
    return named_change(sources, options.change or "")


def _units(
    sources: Sources, build: Outcome, change: SourceChange | None, named: Sequence[str]
) -> list[Unit]:
    if change is not None:
        return touched(sources, build.recipe, change.texts)
    for path in named:
        if path not in build.recipe.units:
            raise UsageError(
                f"vllm {build.source.version} compiles no {path} for {build.recipe.arch_list}"
                f"{did_you_mean(path, build.recipe.units)}"
            )
    return [build.recipe.units[path] for path in named]


def _say_plan(build: Outcome, units: list[Unit], cost: Cost, *, json: bool) -> None:
    if json:
        print_json(CompiledRelease.of(build, (unit.path for unit in units), jobs=cost.jobs))
        return
    for unit in units:
        print(f"{unit.extension}: {unit.path}  ({_targets(unit)})")
    print(cost.brief if units else "the changed files affect no compiled unit")


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
    change = _change(Sources(source.root), options)
    plan = plan_wheel(source, change, options.arch_list, compiler.cuda)
    if options.dry_run:
        _say_wheel_plan(plan, source, options, compiler)
        return
    ref = Ref(options.base or f"pypi:vllm=={options.vllm}")
    with console.step(f"base {ref}"):
        base = with_libraries(ref, platform, index)
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
    _say_wheel(wheel.report)
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


def _say_wheel_plan(
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


def _say_wheel(report: WheelReport) -> None:
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
