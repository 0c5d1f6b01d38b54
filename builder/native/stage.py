"""The compile stage of a plan: what a layer's ``compile`` op takes, pinned, and running it.

Planning a stage compiles nothing: it pins the sources, the change, the compiler and the headers.
Running it gives a companion wheel (``companion.py``), which goes into an image like any other; it
is kept in the cache under the digest of everything that went into it.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from builder import __version__
from builder.bases import BaseRequest, identify
from builder.console import console
from builder.errors import EngineError, Exit, SparkBuildError
from builder.index import write_atomically
from builder.locks import locked
from builder.model import Platform
from builder.native.base import DISTRIBUTIONS
from builder.native.changes import changed_by, image_of
from builder.native.cmake import evaluate
from builder.native.companion import build_companion
from builder.native.companionplan import plan_companion
from builder.native.companionrequest import request_for
from builder.native.cost import cost_of_units, free_here, refuse_machine
from builder.native.includes import Sources
from builder.native.source import source_of
from builder.native.toolchain import (
    compiler_versions,
    find_nvcc,
    header_wheels,
    pinned_torch,
)
from builder.paths import cache_dir, package_file
from builder.runtime.spark_apply import (
    Stage,
    Target,
    canonical_json,
    normalize,
    sha256_hex,
    wheel_members,
)
from builder.wheels import RemoteWheel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from builder.bases import Base
    from builder.forge.store import Forges
    from builder.index import PackageIndex
    from builder.native.changes import SourceChange
    from builder.native.cmake import Unit
    from builder.native.companionplan import CompanionPlan
    from builder.native.source import SourceTree
    from builder.runtime.spark_apply import Member, Tree


def refuse_cpu_torch(index: PackageIndex, torch: str, target: Target, release: str) -> None:
    """Refuse wheels whose torch has no CUDA: nothing is there to hold a companion against.

    Raises:
        SparkBuildError: it is a CPU build (exit 10).
    """
    platform = Platform.parse(target.platform, target.python)
    wheel = RemoteWheel(index.choose("torch", torch, platform), index)
    if "torch/lib/libtorch_cuda.so" not in wheel.members:
        raise SparkBuildError(
            f"torch {torch} for {target.platform} on the package index is a CPU build, and what is "
            "compiled has to be held against the libraries of one for CUDA",
            Exit.NEEDS_REBUILD,
            hint=f"name the image or the environment that it is for: --base {image_of(release)}",
        )


@dataclass(frozen=True)
class Work:
    """What a stage compiles: sources, what is changed in them, and the units that this reaches."""

    source: SourceTree
    change: SourceChange
    plan: CompanionPlan


class Stages:
    """What ``--compile`` allows: stages for the layers of a plan, and running them here."""

    def __init__(self, index: PackageIndex, forges: Forges | None = None) -> None:
        self._index = index
        self._forges = forges
        self._requests: dict[str, dict[str, Any]] = {}
        #: by the digest of a request: what it is compiled of
        self._work: dict[str, Work] = {}
        #: file name of a wheel that a stage has made -> where it is
        self.wheels: dict[str, Path] = {}

    # -- planning

    def stage(
        self, op: Mapping[str, Any], packages: Mapping[str, str], target: Target, module: str
    ) -> Stage:
        """The stage of a ``compile`` op, with its wheel where that was made before.

        ``module`` is the sha256 of the extension that the wheel goes beside, and is held against.

        Raises:
            EngineError: this machine has no compiler, or is of another architecture.
            UsageError: the release's sources are not on the index, or cannot be read.
            RemoteError: they cannot be fetched.
            SparkBuildError: the sources have neither text of the change (drift, exit 4), or have
                it already (exit 10).
        """
        here = Target.here().platform
        if target.platform != here:
            spark = ": the Spark itself, say" if target.platform == "linux/arm64" else ""
            raise EngineError(
                f"the base is for {target.platform} and this machine is {here}: what is compiled "
                "is loaded into the base's own process, so it is compiled where that runs",
                hint=f"run the same command on a {target.platform} machine{spark}",
            )
        vllm, torch = packages["vllm"], packages.get("torch", "")
        key = sha256_hex(canonical_json([op, torch, vllm, module]))
        if key not in self._requests:
            with console.step(f"sources of vllm {Version(vllm).public}"):
                self._requests[key] = self._request(op, vllm, torch, target, module)
        request = self._requests[key]
        return Stage(request, self._made(request))

    def _request(
        self, op: Mapping[str, Any], vllm: str, torch: str, target: Target, module: str
    ) -> dict[str, Any]:
        nvcc, cuda = find_nvcc()
        if shutil.which("g++") is None:
            raise EngineError("no g++ on PATH, and nvcc calls it", hint="apt-get install g++")
        tree = source_of(self._index, vllm, self._forges)
        release = tree.version
        recipe = evaluate(tree, op["arch"], cuda)
        sources = Sources(tree.root, recipe.generated)
        change = changed_by(sources, op["change"])
        if not change.texts:
            raise SparkBuildError(
                f"the sources of vllm {release} have {change.name} already, and this base was not "
                f"built for SM121 from them",
                Exit.NEEDS_REBUILD,
                hint=f"build yours with TORCH_CUDA_ARCH_LIST={op['arch']}"
                + ("" if Version(release).is_devrelease else f", or --base pypi:vllm=={release}"),
            )
        plan = plan_companion(tree, change, op["arch"], cuda)
        if not torch:  # a base of released wheels has the torch that it would be installed with
            torch = pinned_torch(tree.root)
            refuse_cpu_torch(self._index, torch, target, release)
        inputs = [
            {
                "distribution": "vllm",
                "version": release,
                "filename": tree.origin,
                "sha256": tree.sha256,
                "member": "sources to compile",
            },
            *(
                {**pin, "member": "headers"}
                for pin in header_wheels(self._index, nvcc, cuda, Version(torch).public)
            ),
        ]
        changed = [
            {"path": path, "before": sha256_hex(sources.texts[path]), "after": sha256_hex(text)}
            for path, text in sorted(change.texts.items())
        ]
        request = {
            "change": change.name,
            "arch": op["arch"],
            "platform": target.platform,
            "vllm": release,
            "torch": torch,
            "module": module,
            "compilers": compiler_versions(nvcc),
            "operators": [operator.name for operator in plan.operators],
            "files": changed,
            "units": [unit_json(unit) for unit in (*plan.rebuilt, *plan.siblings)],
            "inputs": inputs,
        }
        self._work[_digest(request)] = Work(tree, change, plan)
        return request

    def _made(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The pin of the wheel that a stage made, where it is in the cache and whole."""
        folder = _folder(request)
        try:
            pin: dict[str, Any] = json.loads((folder / "wheel.json").read_bytes())
            data = (folder / pin["filename"]).read_bytes()
        except (OSError, ValueError, KeyError):
            return None
        if sha256_hex(data) != pin["sha256"]:
            return None
        self.wheels[pin["filename"]] = folder / pin["filename"]
        return pin

    # -- running

    def run(self, request: Mapping[str, Any], base: Base) -> dict[str, Any]:
        """Compile a stage and keep its wheel; gives the wheel's pin.

        Raises:
            EngineError: this machine is too small, or lacks a tool.
            BuildFailed: the compiler or the linker refuses.
            SparkBuildError: what came out would not load, or is not real (exit 5).
        """
        cost = cost_of_units([unit["path"] for unit in request["units"]])
        refuse_machine(cost, *free_here())
        folder = _folder(request)
        with locked(f"companion {folder.name}"):
            made = self._made(request)
            if made is not None:
                return made
            console.say(f"  {request['change']} for {request['arch']}: {cost}")
            wheel = build(request, self._work[_digest(request)], base, self._index)
            name, version, _, _ = parse_wheel_filename(wheel.name)
            pin = {
                "distribution": normalize(name),
                "version": str(version),
                "filename": wheel.name,
                "sha256": sha256_hex(wheel.read_bytes()),
            }
            write_atomically(folder / "wheel.json", json.dumps(pin).encode())
        self.wheels[wheel.name] = wheel
        return pin

    # -- what came out, as a wheel on an index would give it

    def members(self, filename: str) -> list[Member]:
        """The files of a wheel that a stage made."""
        with zipfile.ZipFile(self.wheels[filename]) as archive:
            return wheel_members(archive)

    def member(self, filename: str, path: str) -> bytes:
        """One file of it."""
        with zipfile.ZipFile(self.wheels[filename]) as archive:
            return archive.read(path)


def _digest(request: Mapping[str, Any]) -> str:
    return sha256_hex(canonical_json(request))


def _folder(request: Mapping[str, Any]) -> Path:
    """Where its wheel is kept: under what goes in, and what of ours goes into every companion."""
    loader = package_file("runtime", "companion_loader.py").read_bytes()
    key = [dict(request), __version__, sha256_hex(loader)]
    return cache_dir() / "companions" / sha256_hex(canonical_json(key))[:32]


def unit_json(unit: Unit) -> dict[str, Any]:
    """A unit as a plan names it."""
    return {
        "path": unit.path,
        "extension": unit.extension,
        "gencode": [f"{virtual},{real}" for virtual, real in unit.gencodes],
    }


def build(request: Mapping[str, Any], work: Work, base: Base, index: PackageIndex) -> Path:
    """The companion wheel of a stage, in the stage's folder of the cache."""
    with _with_torch(base, index) as tree:
        wanted = request_for(
            index, tree, work.source, work.change, arch_list=request["arch"], plan=work.plan
        )
        return build_companion(wanted, _folder(request)).path


@contextmanager
def _with_torch(base: Base, index: PackageIndex) -> Iterator[Tree]:
    """A base's files with the libraries that its extensions need: a plan for wheels needs none."""
    if base.identity.kind != "pypi":
        yield base.tree
        return
    found = identify(
        BaseRequest(
            ref=f"pypi:vllm=={base.identity.packages['vllm']}",
            platform=base.identity.platform.oci,
            python=".".join(map(str, base.identity.platform.python_version)),
            pins={},
            tracked=DISTRIBUTIONS,
            index=index,
        )
    )
    try:
        yield found.tree
    finally:
        found.close()
