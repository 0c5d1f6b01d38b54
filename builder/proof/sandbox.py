"""A managed Python environment that runs a vLLM that is not installed.

It has the few packages that vLLM's kernel selection imports, and a torch that needs no CUDA
(`builder.proof.torchfolder`); vLLM's and FlashInfer's own Python files come from the target, file
by file.  There is one cached environment for each set of versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from builder.applier.digests import canonical_json, sha256_hex
from builder.common.background import in_background, wait_for_background
from builder.common.console import console
from builder.common.diskspace import Need, check_room
from builder.common.document import read
from builder.common.leftovers import making
from builder.common.locks import locked
from builder.common.paths import cache_dir, package_file
from builder.common.programs import DISPATCH
from builder.errors import UsageError
from builder.images.bases.model import TRACKED
from builder.proof.installer import (
    SandboxUnavailable,
    call,
    environment_command,
    install_command,
)
from builder.proof.isolation import interpreter_folders
from builder.proof.replies import DispatchReply, LocalFiles, ProbeReply, reply_of
from builder.proof.torchfolder import torch_folder, torch_need, wanted_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.applier.trees import Tree
    from builder.common.programs import Program
    from builder.proof.torchfolder import Torch
    from builder.proof.trust import IsolatedRun

T = TypeVar("T", bound=ProbeReply)

#: Top-level directories of site-packages whose Python files the probe may need.
_PACKAGES = ("vllm", "flashinfer", "flashinfer_cubin", "flashinfer_jit_cache", "b12x")
#: Files below these are data (headers, vendored sources, tuning tables) and never imported.
_SKIP = (
    "flashinfer/data/",
    "vllm/third_party/triton_kernels/",
    "vllm/model_executor/layers/fused_moe/configs/",
)
#: Suffixes of files that kernel selection reads; RECORD lists the extension modules.
_SUFFIXES = (".py", ".json", ".toml", "/METADATA", "/RECORD", "/entry_points.txt")


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Packages that a range of vLLM releases needs."""

    name: str
    packages: tuple[str, ...]
    needs_dsl: bool
    pretend_triton: bool
    megabytes: int


#: A cached tree that was used in this many seconds is not removed.
_IN_USE = 3600.0
#: Download size of a CuTe DSL with its libraries in MB, for the message.
_DSL_MEGABYTES = 160
#: Seconds for the dispatch probe, which takes ten on a quiet machine and minutes on an emulated
#: processor: code that is known does not hang on purpose.
_KNOWN, _UNKNOWN = 1800.0, 300.0
#: Bytes on disk for each downloaded byte.
_ON_DISK = 5


def requirements_for(vllm: str) -> Requirements:
    """The packages for a vLLM release: all sets whose range has it.

    Raises:
        UsageError: no set covers the release.
    """
    raw = tomllib.loads(package_file("data", "sandbox-requirements.toml").read_text("utf-8"))
    sets = [s for s in raw["set"] if SpecifierSet(s["vllm"]).contains(vllm, prereleases=True)]
    if not sets:
        raise UsageError(f"no sandbox is available for vllm {vllm}")
    needs_dsl = any(s["needs-dsl"] for s in sets)
    packages = sorted({package for s in sets for package in s["python-packages"]})
    return Requirements(
        name="-".join(s["name"] for s in sets if s["name"].startswith("transformers")),
        packages=tuple(packages),
        needs_dsl=needs_dsl,
        pretend_triton=any(s.get("pretend-triton", False) for s in sets),
        megabytes=sum(s.get("megabytes", 0) for s in sets),
    )


def sandbox_needs(packages: Mapping[str, str], tree: Tree) -> list[Need]:
    """The disk space that verification needs if there is no sandbox for this release yet."""
    try:
        sandbox = Sandbox(requirements_for(packages.get("vllm", "")))
    except (UsageError, InvalidVersion):
        return []
    torch = torch_need(wanted_torch(tree, packages))
    return [*([] if sandbox.complete else [sandbox.need]), *([torch] if torch else [])]


class Sandbox:
    """A virtual environment for one set of requirements."""

    def __init__(self, requirements: Requirements) -> None:
        self.requirements = requirements
        inputs = [platform.machine(), sys.version_info[:2], requirements.packages]
        key = sha256_hex(canonical_json(inputs))
        self.root = cache_dir() / "sandbox" / f"{requirements.name}-{key[:12]}"
        self.python = self.root / "bin" / "python"

    @property
    def complete(self) -> bool:
        """Whether it has been created."""
        return (self.root / "complete").exists()

    @property
    def need(self) -> Need:
        """The disk space that it needs, including pip's downloads."""
        size = _ON_DISK * self.requirements.megabytes * 1_000_000
        return Need(
            self.root, size, "the environment for verification", "--no-verify, or "
            "spark-build cache prune, or set SPARK_BUILD_CACHE to a folder on another disk",
        )  # fmt: skip

    def prepare(self) -> None:
        """Create the environment if it is missing.

        Raises:
            SandboxUnavailable: it cannot be created here; the message says why.
        """
        with locked(str(self.root)):
            if self.complete:
                return
            shutil.rmtree(self.root, ignore_errors=True)
            try:
                self._make()
            except BaseException:
                shutil.rmtree(self.root, ignore_errors=True)
                raise
            (self.root / "complete").touch()

    def _make(self) -> None:
        need = self.requirements
        check_room([self.need])
        console.detail(f"a sandbox for {need.name}, kept in {self.root}")
        what = f"{len(need.packages)} packages, about {need.megabytes} MB"
        with console.progress(f"making a sandbox: {what}"):
            call(environment_command(self.root))
            call(install_command(self.python, need.packages))

    def dsl(self, packages: Mapping[str, str]) -> Path:
        """This machine's build of the target's CuTe DSL, for releases whose selection imports it.

        Raises:
            SandboxUnavailable: it cannot be installed.
        """
        wanted = sorted(
            f"{name}=={version}"
            for name, version in packages.items()
            if name.startswith("nvidia-cutlass-dsl") and name in TRACKED
        )
        tag = f"{platform.machine()}-cp{sys.version_info[0]}{sys.version_info[1]}"
        folder = cache_dir() / "sandbox" / f"dsl-{tag}-{sha256_hex(canonical_json(wanted))[:12]}"
        with locked(str(folder)):
            if not folder.exists():
                release = wanted[0].partition("==")[2] if wanted else ""
                title = f"installing the CuTe DSL {release}, up to {_DSL_MEGABYTES} MB"
                with making(folder) as partial, console.progress(title):
                    call(install_command(self.python, wanted, partial))
                    partial.rename(folder)
        return folder

    def ask(self, request: Mapping[str, object], apart: IsolatedRun | None = None) -> DispatchReply:
        """Run the dispatch probe in this environment."""
        timeout = _KNOWN if apart is None else _UNKNOWN
        return ask_probe(self.python, request, DispatchReply, timeout, apart=apart)


@dataclass(frozen=True, kw_only=True)
class PreparedSandbox:
    """A sandbox, and the folders that a probe needs besides the target's files."""

    sandbox: Sandbox
    torch: Torch
    paths: tuple[Path, ...]


def make(requirements: Requirements, torch: str, packages: Mapping[str, str]) -> PreparedSandbox:
    """Create missing parts: the environment, a torch, and the CuTe DSL if it is imported.

    Raises:
        SparkBuildError: a part is not available here.
    """
    wait_for_background()  # which may be making the same
    sandbox = Sandbox(requirements)
    with in_background(
        partial(torch_folder, torch)
    ):  # each of the two is about half of what is fetched
        sandbox.prepare()
        dsl = (sandbox.dsl(packages),) if requirements.needs_dsl else ()
        wait_for_background()
    folder = torch_folder(torch)
    return PreparedSandbox(sandbox=sandbox, torch=folder, paths=(*dsl, folder.folder))


#: Runs a program with one directory hidden from the interpreter.  For ``-c`` the first entry of
#: ``sys.path`` is the current folder, whose files are not to be run.
_WITHOUT = (
    "import sys; sys.path[0] = sys.argv[2]; "
    "import os, runpy; root = os.path.realpath(sys.argv[1]); "
    "sys.path[:] = [p for p in sys.path if f'{os.path.realpath(p)}/'.find(f'{root}/') != 0]; "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)


def ask_probe(
    python: Path,
    request: Mapping[str, object],
    form: type[T],
    timeout: float = 300,
    program: Program = DISPATCH,
    instead_of: Path | None = None,
    apart: IsolatedRun | None = None,
) -> T:
    """Run a program with an interpreter; ``timeout`` is in seconds.

    ``instead_of`` is a directory that the interpreter must not see, because the request's ``paths``
    have its replacement; nothing is written there.  With ``apart`` it runs isolated.

    Raises:
        SandboxUnavailable: the probe gave no result.
        MalformedReply: its result is malformed.
    """
    text = json.dumps(request, sort_keys=True)
    try:
        command = [str(python), str(program.file())]
        if instead_of is not None:
            command[1:1] = ["-B", "-c", _WITHOUT, str(instead_of)]
        if apart is None:
            answer = _run_probe(tuple(command), text, timeout)
        else:
            seen = (*_folders_of(request), *interpreter_folders(python), program.file())
            answer = apart.isolation.run(command, text, seen, timeout)
        result = json.loads(answer)
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(f"{program.name} took more than {timeout:.0f} s") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SandboxUnavailable(f"{program.name} gave no result: {error}") from None
    if not isinstance(result, dict):
        raise SandboxUnavailable(f"{program.name} gave no result: {answer[:80]!r} is not an object")
    reply = reply_of(result, form)
    return reply if apart is None else reply.simulating(apart.said())


def _folders_of(request: Mapping[str, object]) -> Iterator[Path]:
    """The local folders and files in a request."""
    named = read(request, LocalFiles)
    yield from map(
        Path, (*named.paths, *named.models, *named.extensions.values(), *named.libraries)
    )


@cache
def _run_probe(command: tuple[str, ...], request: str, timeout: float) -> str:
    """The output of a probe.  A sandbox's paths are named by content, so the same request
    has the same reply during this process.  Temporary files of torch and the CuTe DSL are
    removed afterwards.
    """
    own = tempfile.TemporaryDirectory(prefix="spark-build-probe-", ignore_cleanup_errors=True)
    with own as folder:
        answer = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=probe_environment(folder),
            check=False,
        )
    return answer.stdout


def probe_environment(temporary: str) -> dict[str, str]:
    """The variables of a probe that runs on this machine."""
    keep = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in keep if os.environ.get(name)}
    return {**env, "VLLM_NO_USAGE_STATS": "1", "TMPDIR": temporary}


def python_files(tree: Tree) -> Iterator[str]:
    """Paths of the target's Python files and metadata that kernel selection may read."""
    pending = [name for name in tree.children("") if name in _PACKAGES]
    pending += [d.info_dir for d in tree.distributions().values()]
    while pending:
        path = pending.pop()
        if any(f"{path}/".startswith(skip) for skip in _SKIP):
            continue
        children = tree.children(path)
        if children:
            pending.extend(f"{path}/{name}" for name in children)
        elif path.endswith(_SUFFIXES):
            yield path


def folder_of(tree: Tree) -> Path:
    """The directory of :func:`lay_out`, named by content; it may not exist yet."""
    rows = [[path, tree.digest(path)] for path in sorted(python_files(tree))]
    return cache_dir() / "trees" / sha256_hex(canonical_json(rows))[:24]


def lay_out(tree: Tree) -> Path:
    """The target's Python files as a directory, cached by content."""
    from builder.layers.plan.sources import preload

    paths = sorted(python_files(tree))
    folder = folder_of(tree)
    with locked(str(folder)):
        if folder.exists():
            os.utime(folder)
            return folder
        preload(tree, paths)
        with making(folder) as partial:
            for path in paths:
                target = partial / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(checked(tree, path))
            partial.rename(folder)
    _prune(folder.parent, keep=12)
    return folder


def checked(tree: Tree, path: str) -> bytes:
    """A file, checked against the sha256 by which it was judged.

    Raises:
        SandboxUnavailable: the bytes do not match the tree's sha256.
    """
    data = tree.read(path) or b""
    if sha256_hex(data) != tree.digest(path):
        raise SandboxUnavailable(f"{path} does not match its sha256")
    return data


def _prune(parent: Path, keep: int) -> None:
    """Remove the oldest folders, except those that another run may be reading."""
    settled = time.time() - _IN_USE
    folders = sorted((p.stat().st_mtime, p) for p in parent.iterdir() if p.is_dir())
    for used, old in folders[:-keep]:
        if used < settled:
            with contextlib.suppress(OSError), making(old) as gone:  # another run was first
                old.rename(gone)  # never leave half of it under its name
