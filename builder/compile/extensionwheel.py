"""Builds an extension wheel: rebuilt kernels that replace those of a prebuilt vLLM.

The rebuilt units, and the few between them and their torch operators, are linked into a library
that registers the operators again; vLLM loads it in every process as a plugin.  vLLM's own files
are unchanged.  The same content gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import resource
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, structs

from builder.applier.values import canonical_json, sha256_hex
from builder.common.console import console, counted
from builder.common.document import Count, Document, Part, Seconds, Sha256, Text, always, plain
from builder.common.files import write_atomically
from builder.common.machinecode import code_of, images, is_trap, telling
from builder.common.paths import package_file
from builder.common.plan import Input
from builder.compile.build import HOST_SUFFIXES, compile_units
from builder.compile.cplusplus import again
from builder.compile.link import InstalledLibraries, Runtime, link
from builder.compile.operators import Discovery, OperatorName, registration_source
from builder.compile.plans import UnitRow, plan_wheel, runs_on, with_definers
from builder.compile.sources import Sources, Unit
from builder.compile.toolchain import header_version, make_toolchain, torch_headers
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.applier.trees import Tree
    from builder.common.machinecode import Image
    from builder.common.pypi import PackageIndex
    from builder.compile.changes import SourceChange
    from builder.compile.operators import Operator
    from builder.compile.plans import WheelPlan
    from builder.compile.sources import BuildRecipe, SourceTree
    from builder.compile.toolchain import Compiler, Toolchain

    Released = Callable[[frozenset[str]], Mapping[str, Mapping[str, int]]]
    from builder.compile.build import BuiltUnit
    from builder.compile.link import Linked

# ------------------------------------------------------------------------------------------- inputs


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
            ``builder.compile.link.DISTRIBUTIONS`` tracked.
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
        UsageError: two of these versions differ.
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


# ------------------------------------------------------------------------------------------ sources


#: CPython's headers: some units include them for the macro that defines an extension module.  The
#: library of an extension wheel is not a Python module.
_PYTHON = re.compile(rb"^([ \t]*#[ \t]*include[ \t]*<Python\.h>)", re.MULTILINE)


def wheel_sources(
    sources: Sources,
    recipe: BuildRecipe,
    change: SourceChange,
    units: Iterable[Unit],
    mark: str,
) -> SourceChange:
    """A change, with the edits that its units need to be loaded beside an extension.

    A unit that registers operators itself registers them for the wheel.  It defines none,
    because vLLM has already defined them.  CPython's headers are left out.

    Args:
        sources: the release's sources.
        recipe: the build recipe.
        change: the change.
        units: the units to compile.
        mark: the location of the registration that torch shows.

    Raises:
        UsageError: such a unit is not UTF-8 text.
    """
    changed = replace(sources, changed=change.texts)
    discovery = Discovery(changed, recipe, "")
    texts = dict(change.texts)
    for unit in units:
        for path in sorted(changed.closure(unit.path)):
            if _PYTHON.search(changed.texts[path]):
                texts[path] = _PYTHON.sub(rb"// \1", changed.texts[path])
        text, facts = discovery.file(unit.path, unit.extension)
        if not facts.blocks or unit.path.endswith(HOST_SUFFIXES):
            continue
        try:
            raw = texts.get(unit.path, changed.texts[unit.path]).decode("utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{unit.path} is not UTF-8 text, but it registers operators") from None
        texts[unit.path] = again(
            raw, facts.blocks, text, (unit.path, unit.extension, mark)
        ).encode()
    return replace(change, texts=texts)


# ---------------------------------------------------------------------- machine code of the kernels


#: Instructions that write memory visible to other threads or the host; not ``REDUX``.
_WRITES = frozenset(
    ("ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
)


@dataclass(frozen=True, kw_only=True)
class KernelProof:
    """The result; ``kernels`` are counts by target, ``instructions`` those that show real code."""

    kernels: Mapping[str, int]
    instructions: Mapping[str, int]
    faults: tuple[str, ...]
    #: kernels that write to memory; None if an operator's known instruction is checked
    writing: int | None = None
    #: kernels that are the same as the release's
    as_released: tuple[str, ...] = ()
    #: kernels that the driver compiles from PTX for SM121
    from_ptx: int = 0


def instructions_of(file: Path, wanted: frozenset[str]) -> dict[str, dict[str, int]]:
    """The instructions of some kernels of a library that ``prove_kernels`` compares.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
        BadBinary, BadCubin: the library cannot be read.
    """
    return code_of(file, wanted.__contains__, _telling_or_writing)


def prove_kernels(
    library: bytes,
    operators: Sequence[Operator],
    objects: Sequence[Path] = (),
    released: Released | None = None,
) -> KernelProof:
    """Check every SM12x kernel of a library.

    Args:
        library: the linked library.
        operators: its operators.
        objects: its object files; it must have every kernel of these.
        released: returns the machine code of the base's kernels, if one of the library's
            does not look real; None if there is nothing to compare with.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
        BadBinary, BadCubin: the library cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        file = Path(scratch) / "kernels.so"
        file.write_bytes(library)
        every = images(file)
        cubins = [image for image in every if image.kind == "elf"]
        code = code_of(file, lambda _: True, _telling_or_writing) if cubins else {}
    by_target: Counter[str] = Counter()
    for image in (image for image in cubins if image.kernels):
        by_target[str(image.arch)] += len(image.kernels)
    jit = {
        name: counts
        for image in every
        if image.kind == "ptx" and image.arch.compiles_on()
        for name, counts in image.kernels.items()
        if name not in code
    }
    total: Counter[str] = Counter()
    faults = []
    proven: set[str] = set()
    for operator in (operator for operator in operators if operator.kernels):
        pattern = re.compile(operator.kernels)
        mine = {name: counts for name, counts in code.items() if pattern.search(name)}
        proven.update(mine)
        if not mine:
            faults.append(f"{operator.name}: the library has no kernel for it")
        for name, counts in sorted(mine.items()):
            expected = {n: c for n, c in counts.items() if n.startswith(operator.holds)}
            total.update(expected)
            if not expected:
                faults.append(f"no {operator.holds} in {name[:120]}")
    unknown = not all(operator.kernels for operator in operators)
    if not unknown:
        proven = set(code)
    faults += [f"a trap in {n[:120]}" for n in sorted(proven) if any(map(is_trap, code[n]))]
    rest = {name: counts for name, counts in code.items() if name not in proven}
    for counts in rest.values():
        total.update({name: number for name, number in counts.items() if not _writes(name)})
    if unknown:
        faults += [
            f"a trap in the PTX of {n[:120]}" for n in sorted(jit) if any(map(is_trap, jit[n]))
        ]
        missing = {name for image in every for name in image.kernels} - set(code) - set(jit)
        faults += [f"{name[:120]} has no code that SM121 can load" for name in sorted(missing)]
        faults += _lost(objects, cubins)
    unreal = {name: reason for name, counts in rest.items() if (reason := _unreal(counts))}
    same = _as_released(unreal, released)
    faults += [f"{unreal[name]} {name[:120]}" for name in sorted(set(unreal) - set(same))]
    return KernelProof(
        kernels=dict(sorted(by_target.items())),
        instructions=dict(total.most_common()),
        faults=tuple(faults),
        writing=len(rest) - len(unreal) if unknown else None,
        as_released=same,
        from_ptx=len(jit),
    )


def _machine_code(file: Path) -> list[Image]:
    return [image for image in images(file) if image.kind == "elf"]


def _telling_or_writing(counts: Mapping[str, int]) -> dict[str, int]:
    """Instructions that show real code, and those that write to memory."""
    writes = {name: number for name, number in counts.items() if _writes(name)}
    return telling(counts) | writes


def _writes(instruction: str) -> bool:
    return instruction.partition(".")[0] in _WRITES


def _unreal(counts: Mapping[str, int]) -> str:
    """Why a kernel does not look real, or ``""``."""
    if any(map(is_trap, counts)):
        return "a trap in"
    return "" if any(map(_writes, counts)) else "nothing is written to memory by"


def _as_released(unreal: Mapping[str, str], released: Released | None) -> tuple[str, ...]:
    """Kernels that do not look real but are the same in the release."""
    if not unreal or released is None:
        return ()
    theirs = released(frozenset(unreal))
    same = (name for name in theirs if _unreal(theirs[name]) == unreal.get(name))
    return tuple(sorted(same))


def _lost(objects: Sequence[Path], library: Sequence[Image]) -> list[str]:
    """Kernels of object files that a library lacks, for the same architecture."""
    there = {(image.arch, name) for image in library for name in image.kernels}
    compiled = {
        (image.arch, name)
        for file in objects
        for image in _machine_code(file)
        for name in image.kernels
    }
    return [f"{name[:120]} for {arch} is missing" for arch, name in sorted(compiled - there)]


# ---------------------------------------------------------------------------------------- documents


Gigabytes = Annotated[float, Meta(ge=0)]


class CompilerVersions(Part, frozen=True, kw_only=True):
    """The versions of both compilers."""

    nvcc: Text
    host: Text


class KernelFacts(Part, frozen=True, kw_only=True):
    """The kernels of a library; all fields but the first two only if no instruction is known."""

    by_target: Annotated[dict[str, Count], Meta(description="kernels by target")]
    instructions: Annotated[dict[str, Count], Meta(description="tensor-core instructions by name")]
    writing: Annotated[
        Count | None,
        Meta(description="kernels that write to memory; where no instruction is known to tell"),
    ] = None
    from_ptx: Annotated[
        Count | None, Meta(description="kernels that the driver compiles on SM121")
    ] = None
    as_released: Annotated[
        tuple[Text, ...] | None, Meta(description="kernels that do not, like those of the release")
    ] = None

    @classmethod
    def of(cls, proof: KernelProof) -> KernelFacts:
        """The facts from a check of kernels."""
        told = proof.writing is not None
        return cls(
            by_target=dict(proof.kernels),
            instructions=dict(proof.instructions),
            writing=proof.writing,
            from_ptx=proof.from_ptx if told else None,
            as_released=proof.as_released if told else None,
        )


class WheelFacts(Part, frozen=True, kw_only=True):
    """The wheel's contents, in its ``companion.json``, without machine or time."""

    schema: Literal[1] = always(1)
    name: Text
    mark: Annotated[
        Text,
        Meta(description="the source location that torch shows for the operators"),
    ]
    vllm: Text
    source_sha256: Annotated[str, Meta(description="of the source archive; empty for a folder")]
    change: Text
    changed: Annotated[
        dict[str, Sha256], Meta(description="changed source file -> sha256 of its new text")
    ]
    torch: Text
    cuda: Text
    compilers: CompilerVersions
    toolkit: Annotated[
        tuple[Input, ...],
        Meta(description="the released wheels that nvcc comes from; empty where it was installed"),
    ]
    cuda_runtime: Annotated[
        Runtime,
        Meta(description="shared: the base's own; static: one of its own"),
    ]
    flags: tuple[Text, ...]
    flags_between: Annotated[
        tuple[Text, ...],
        Meta(description="of the units between, instead of the release's own definitions"),
    ]
    targets: tuple[Text, ...]
    capabilities: Annotated[
        tuple[tuple[Count, Count], ...],
        Meta(description="compute capabilities on which it is loaded"),
    ]
    units: tuple[Text, ...]
    modules: Annotated[tuple[Text, ...], Meta(description="extensions that are loaded before it")]
    operators: tuple[OperatorName, ...]
    library: Text
    library_sha256: Sha256
    older_glibc: Annotated[
        dict[str, Text],
        Meta(
            description="function of the C library -> the version that is asked for instead of "
            "the newest"
        ),
    ]
    kernels: KernelFacts


class AbiFacts(Part, frozen=True, kw_only=True):
    """The library's requirements from the base."""

    symbols: Annotated[
        dict[str, Count],
        Meta(description="library of the base -> symbols that are taken from it"),
    ]
    needed: tuple[Text, ...]
    newest_versions: Annotated[
        dict[str, Text], Meta(description="family of versions -> the newest required version")
    ]
    faults: tuple[Text, ...]
    stand_ins: Annotated[
        dict[str, Text],
        Meta(description="library that the base lacks -> the file that was read instead"),
    ]

    @classmethod
    def of(cls, linked: Linked) -> AbiFacts:
        """The facts of a linked library."""
        proof = linked.proof
        return cls(
            symbols=dict(proof.symbols),
            needed=proof.needed,
            newest_versions=dict(proof.versions),
            faults=proof.faults,
            stand_ins=dict(linked.base.stand_ins),
        )


class WheelUnit(Part, frozen=True, kw_only=True):
    """A unit of the wheel."""

    path: Text
    seconds: Annotated[
        Seconds, Meta(description="seconds of its compilation, possibly in an earlier run")
    ]


class WheelTimes(Part, frozen=True, kw_only=True):
    """Seconds of this run."""

    compile: Seconds
    link_and_proof: Seconds


class WheelReport(Document, frozen=True, kw_only=True):
    """An extension wheel, with its checks."""

    wheel: Annotated[Text, Meta(description="its path")]
    sha256: Sha256
    size: Count
    companion: WheelFacts
    abi: AbiFacts
    units: tuple[WheelUnit, ...]
    seconds: WheelTimes
    peak_memory_gb: Annotated[
        Gigabytes | None,
        Meta(
            description="of the largest program that this run started; null where a toolkit "
            "image compiled"
        ),
    ]
    passed: Annotated[bool, Meta(extra_json_schema={"const": True})]


class PlannedWheel(Document, frozen=True, kw_only=True):
    """The plan of an extension wheel."""

    vllm: Text
    rebuild: Annotated[tuple[UnitRow, ...], Meta(description="units that the change reaches")]
    between: Annotated[
        tuple[UnitRow, ...], Meta(description="units between these and their operators")
    ]
    operators: tuple[Text, ...]
    units: Annotated[Count, Meta(description="of the whole release")]
    jobs: Annotated[Count, Meta(description="units compiled at once")]

    @classmethod
    def of(cls, plan: WheelPlan, vllm: str, jobs: int) -> PlannedWheel:
        """The document for a plan."""
        return cls(
            vllm=vllm,
            rebuild=tuple(map(UnitRow.of, plan.rebuilt)),
            between=tuple(map(UnitRow.of, plan.siblings)),
            operators=tuple(operator.name for operator in plan.operators),
            units=len(plan.recipe.units),
            jobs=jobs,
        )


# ----------------------------------------------------------------------------------------- the file


#: The earliest timestamp in a zip archive.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, kw_only=True)
class WheelNames:
    """The names of an extension wheel; ``package`` is its import name."""

    package: str
    version: str
    platform: str

    @classmethod
    def of(cls, change: str, vllm: str, content: str, platform: str) -> WheelNames:
        """Names for a change: ``spark_build_companion_sm120_family``, ``0.19.1+<content>``.

        Args:
            change: name of the source change.
            vllm: the vLLM release.
            content: hexadecimal digest of all inputs.
            platform: that of the base's wheel.
        """
        word = re.sub(r"[^a-z0-9]+", "_", change.lower()).strip("_") or "patch"
        return cls(
            package=f"spark_build_companion_{word}",
            version=f"{vllm.partition('+')[0]}+{content[:12]}",
            platform=platform,
        )

    @property
    def project(self) -> str:
        """The distribution's name."""
        return self.package.replace("_", "-")

    @property
    def filename(self) -> str:
        """The wheel's file name."""
        return f"{self.package}-{self.version}-py3-none-{self.platform}.whl"


def wheel_bytes(
    names: WheelNames, files: Mapping[str, bytes], requires: str, summary: str
) -> bytes:
    """Write a wheel; returns its bytes.

    Args:
        names: its names.
        files: path below the package -> content; ``__init__.py`` has the function ``load``.
        requires: its dependency, such as ``vllm==0.19.1``.
        summary: a one-line description.
    """
    info = f"{names.package}-{names.version}.dist-info"
    members = {f"{names.package}/{path}": data for path, data in files.items()}
    members[f"{info}/METADATA"] = (
        "Metadata-Version: 2.1\n"
        f"Name: {names.project}\n"
        f"Version: {names.version}\n"
        f"Summary: {summary}\n"
        f"Requires-Dist: {requires}\n"
    ).encode()
    members[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\n"
        "Generator: spark-build\n"
        "Root-Is-Purelib: false\n"
        f"Tag: py3-none-{names.platform}\n"
    ).encode()
    members[f"{info}/entry_points.txt"] = (
        f"[{_GROUP}]\n{names.package} = {names.package}:load\n"
    ).encode()
    rows = [f"{path},{_digest(data)},{len(data)}" for path, data in sorted(members.items())]
    record = f"{info}/RECORD"
    members[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    out = io.BytesIO()
    # not deflated: the machine code is already compressed, and zlib versions give different bytes
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path, data in sorted(members.items(), key=lambda item: (item[0] == record, item[0])):
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.create_system = 3  # Unix: what follows are a Unix file's type and mode
            entry.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, data)
    return out.getvalue()


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


# ---------------------------------------------------------------------------------------- the wheel


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
    defined = [flag for flag in plan.recipe.flags if flag.startswith("-D")]
    defined = [flag for flag in defined if not flag.startswith("-DENABLE_")]
    return replace(plan.recipe, flags=(*defined, *(f"-D{define}" for define in defines)))


def _compile_between(plan: WheelPlan, request: WheelRequest, mark: str) -> list[BuiltUnit]:
    """Compile the units between operators and kernels, and the one that registers operators."""
    recipe = _between_recipe(plan)
    device = [unit for unit in plan.siblings if not unit.path.endswith(HOST_SUFFIXES)]
    host = [unit for unit in plan.siblings if unit.path.endswith(HOST_SUFFIXES)]
    text = registration_source(plan.operators, mark).encode()
    own = Unit(path=_REGISTRATION, extension=plan.rebuilt[0].extension, gencodes=())
    with_own = Sources(plan.sources.root, {**plan.sources.generated, _REGISTRATION: text})
    change, tools, jobs = request.change, request.tools, request.jobs
    built = []
    between = counted(len(plan.siblings), "unit")
    with console.step(f"compile {between} that connect operator and kernels"):
        # kept apart from the host's and later units: these take minutes
        for group in (
            [unit for unit in device if unit not in plan.added],
            [unit for unit in device if unit in plan.added],
        ):
            if group:
                built += compile_units(plan.sources, recipe, group, change, tools, jobs)
        units = (*host, own) if not all(op.own for op in plan.operators) else (*host,)
        if units:
            built += compile_units(with_own, recipe, units, change, tools, jobs, with_host=True)
    return built


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
    loader = package_file("probes", "wheel_loader.py").read_bytes()
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
