"""Builds an extension wheel: rebuilt kernels that replace those of a prebuilt vLLM.

The rebuilt units, and the few between them and their torch operators, are linked into a
library that registers the operators again; vLLM loads it in every process as a plugin.  vLLM's
own files are unchanged.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from builder.applier.digests import canonical_json, sha256_hex
from builder.compile.build import HOST_SUFFIXES, compile_units
from builder.compile.cmake import Unit
from builder.compile.includes import Sources
from builder.compile.kernelcheck import KernelProof, instructions_of, prove_kernels
from builder.compile.link import link
from builder.compile.outcome import runs_on
from builder.compile.registration import OperatorName, registration_source
from builder.compile.wheeldocuments import (
    AbiFacts,
    CompilerVersions,
    KernelFacts,
    WheelFacts,
    WheelReport,
    WheelTimes,
    WheelUnit,
)
from builder.compile.wheelfile import WheelNames, wheel_bytes
from builder.compile.wheelplan import plan_wheel, with_definers
from builder.compile.wheelrequest import agreed_torch
from builder.compile.wheelsources import wheel_sources
from builder.errors import Exit, SparkBuildError
from builder.pypi.index import write_atomically
from builder.util.console import console, counted
from builder.util.documents import plain
from builder.util.paths import package_file

if TYPE_CHECKING:
    from builder.compile.base import InstalledLibraries
    from builder.compile.build import BuiltUnit
    from builder.compile.cmake import BuildRecipe
    from builder.compile.link import Linked
    from builder.compile.wheelplan import WheelPlan
    from builder.compile.wheelrequest import WheelRequest

#: Devices of the family: the desktop's and the GB10's.
FAMILY = ((12, 0), (12, 1))
_REGISTRATION = "csrc/spark_build_registration.cpp"


@dataclass(frozen=True, kw_only=True)
class ExtensionWheel:
    """An extension wheel, and how it was built."""

    path: Path
    report: WheelReport


def build_extension_wheel(request: WheelRequest, out: Path) -> ExtensionWheel:
    """Compile, link, check, and write the wheel into a folder.

    Objects come from the cache if possible; nothing is written if a check fails.

    Raises:
        SparkBuildError: nothing to do (exit 3); the library would not load beside the base, or its
            kernels are not real (exit 5).
        UsageError: the headers do not match the base's torch, or the base lacks a part.
        EngineError: a tool is missing.
        BuildFailed: compiling or linking fails.
        RemoteError: the package index does not answer.
    """
    source, tools = request.source, request.tools
    compiler = tools.compiler
    plan = request.plan or plan_wheel(
        source, request.change, request.arch_list, compiler.cuda, request.operators
    )
    torch = agreed_torch(request.base, source.version, tools)
    path = request.base.module(plan.module)
    mark = f"spark-build/{request.change.name}/{source.version}"
    began = time.monotonic()
    while True:
        inner = replace(
            request,
            change=wheel_sources(
                plan.sources, plan.recipe, request.change, (*plan.rebuilt, *plan.siblings), mark
            ),
        )
        with console.step(f"compile {len(plan.rebuilt)} of {len(plan.recipe.units)} units"):
            built = compile_units(
                plan.sources,
                plan.recipe,
                plan.rebuilt,
                inner.change,
                tools,
                request.jobs,
                with_host=True,
            )
        between = _compile_between(plan, inner, mark)
        compiled = time.monotonic()
        with console.step("link, and check the library against the base"):
            objects = [one.object for one in (*built, *between)]
            linked = link(objects, request.base, path, compiler.nvcc, compiler.cuda, compiler.where)
        wider = with_definers(plan, request.change, source.version, linked.proof.open)
        if wider is None:
            break
        plan = wider
    _must_load(linked, source.version)
    with console.step("read the machine code"):
        kernels = prove_kernels(
            linked.data, plan.operators, objects, lambda names: _released(request.base, path, names)
        )
        _must_be_real(kernels, request.arch_list)
    about = _provenance(request, plan, linked, kernels, torch, mark)
    names = WheelNames.of(
        request.change.name,
        source.version,
        sha256_hex(canonical_json(plain(about))),
        request.platform or request.base.wheel_platform(),
    )
    about = structs.replace(about, name=names.project)
    data = _wheel(names, about, linked.data)
    target = out / names.filename
    write_atomically(target, data)
    report = WheelReport(
        wheel=str(target),
        sha256=sha256_hex(data),
        size=len(data),
        companion=about,
        abi=AbiFacts.of(linked),
        units=tuple(
            WheelUnit(path=one.unit.path, seconds=round(one.seconds, 1))
            for one in (*built, *between)
        ),
        seconds=WheelTimes(
            compile=round(compiled - began, 1),
            link_and_proof=round(time.monotonic() - compiled, 1),
        ),
        peak_memory_gb=_peak_memory() if compiler.container is None else None,
        passed=True,
    )
    return ExtensionWheel(path=target, report=report)


def _peak_memory() -> float:
    """Peak memory in gigabytes of the largest child process."""
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 1)


def _between_recipe(plan: WheelPlan) -> BuildRecipe:
    """The recipe with the operators' own definitions, which exclude other chips' kernels.

    Operators found in the sources have none: the recipe is the release's.
    """
    defines = sorted({define for operator in plan.operators for define in operator.defines})
    if not defines:
        return plan.recipe
    kept = [flag for flag in plan.recipe.flags if flag.startswith("-D")]
    kept = [flag for flag in kept if not flag.startswith("-DENABLE_")]
    return replace(plan.recipe, flags=(*kept, *(f"-D{define}" for define in defines)))


def _compile_between(plan: WheelPlan, request: WheelRequest, mark: str) -> list[BuiltUnit]:
    """Compile the units between operators and kernels, and the one that registers operators."""
    recipe = _between_recipe(plan)
    device = [unit for unit in plan.siblings if not unit.path.endswith(HOST_SUFFIXES)]
    host = [unit for unit in plan.siblings if unit.path.endswith(HOST_SUFFIXES)]
    text = registration_source(plan.operators, mark).encode()
    own = Unit(path=_REGISTRATION, extension=plan.rebuilt[0].extension, gencodes=())
    with_own = Sources(plan.sources.root, {**plan.sources.generated, _REGISTRATION: text})
    change, tools, jobs = request.change, request.tools, request.jobs
    made = []
    between = counted(len(plan.siblings), "unit")
    with console.step(f"compile {between} that connect operator and kernels"):
        # kept apart from the host's and later units: these take minutes
        for group in (
            [unit for unit in device if unit not in plan.added],
            [unit for unit in device if unit in plan.added],
        ):
            if group:
                made += compile_units(plan.sources, recipe, group, change, tools, jobs)
        units = (*host, own) if not all(op.own for op in plan.operators) else (*host,)
        if units:
            made += compile_units(with_own, recipe, units, change, tools, jobs, with_host=True)
    return made


def _released(
    base: InstalledLibraries, module: str, names: frozenset[str]
) -> dict[str, dict[str, int]]:
    """The machine code of a base's own kernels of the same names."""
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        return instructions_of(base.file(module, Path(scratch)), names)


def _must_load(linked: Linked, vllm: str) -> None:
    if linked.proof.faults:
        shown = "\n  ".join(linked.proof.faults[:12])
        raise SparkBuildError(
            f"the extension wheel would not load next to vllm {vllm} of this base:\n  {shown}",
            Exit.VERIFY_FAILED,
            hint="compile with the base's own toolkit and torch: see docs/compiling.md",
        )


def _must_be_real(kernels: KernelProof, arch_list: str) -> None:
    if kernels.faults:
        shown = "\n  ".join(kernels.faults[:6])
        raise SparkBuildError(
            f"some kernels of the wheel, compiled for {arch_list}, contain no real code; "
            f"'compile show' lists the guards in the sources:\n  {shown}",
            Exit.VERIFY_FAILED,
            hint="spark-build compile show --vllm VERSION",
        )


def _provenance(
    request: WheelRequest,
    plan: WheelPlan,
    linked: Linked,
    kernels: KernelProof,
    torch: str,
    mark: str,
) -> WheelFacts:
    """The metadata in the wheel, which its loader reads."""
    from builder.compile.build import FLAGS

    targets = sorted({real for unit in plan.rebuilt for _, real in unit.gencodes})
    device = [u for u in (*plan.rebuilt, *plan.siblings) if not u.path.endswith(HOST_SUFFIXES)]
    capabilities = [
        row for row in FAMILY if all(any(runs_on(r, row) for _, r in u.gencodes) for u in device)
    ]
    return WheelFacts(
        name=f"spark-build-companion {request.change.name}",
        mark=mark,
        vllm=request.source.version,
        source_sha256=request.source.sha256,
        change=request.change.name,
        changed={path: sha256_hex(text) for path, text in sorted(request.change.texts.items())},
        torch=torch,
        cuda=request.tools.compiler.cuda,
        compilers=CompilerVersions(**request.tools.compiler.versions),
        toolkit=request.tools.compiler.pins,
        cuda_runtime=linked.runtime,
        flags=(*FLAGS, *(f for f in plan.recipe.flags if f.startswith("-D"))),
        flags_between=tuple(_between_recipe(plan).flags),
        targets=tuple(targets),
        capabilities=tuple(capabilities),
        units=tuple(unit.path for unit in (*plan.rebuilt, *plan.siblings)),
        modules=(plan.module.replace("/", "."),),
        operators=tuple(map(OperatorName.of, plan.operators)),
        library="kernels.so",
        library_sha256=sha256_hex(linked.data),
        older_glibc=dict(sorted(linked.older.items())),
        kernels=KernelFacts.of(kernels),
    )


def _wheel(names: WheelNames, about: WheelFacts, library: bytes) -> bytes:
    loader = package_file("runtime", "wheel_loader.py").read_bytes()
    files = {
        "__init__.py": loader,
        "companion.json": json.dumps(plain(about), indent=1, sort_keys=True).encode() + b"\n",
        "kernels.so": library,
    }
    return wheel_bytes(
        names,
        files,
        f"vllm=={about.vllm.partition('+')[0]}",
        f"Kernels of vLLM {about.vllm} rebuilt with {about.change}, registered in their place",
    )
