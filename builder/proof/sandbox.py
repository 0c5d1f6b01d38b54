"""A managed Python environment that runs a vLLM that is not installed.

It has the few packages that vLLM's kernel selection imports, and a torch that needs no CUDA;
vLLM's and FlashInfer's own Python files come from the target, file by file.  There is one cached
environment for each set of versions.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from builder import settings
from builder.applier.receipts import record_of
from builder.applier.states import Target
from builder.applier.trees import versions
from builder.applier.values import canonical_json, sha256_hex
from builder.common.background import in_background, wait_for_background
from builder.common.cache import locked
from builder.common.console import console
from builder.common.diskspace import Need, check_room
from builder.common.document import read
from builder.common.files import write_atomically
from builder.common.leftovers import keep_latest, making
from builder.common.machinecode import read_elf
from builder.common.paths import cache_dir, package_file
from builder.common.plan import Platform
from builder.common.programs import DISPATCH
from builder.common.pypi import OLDEST_VLLM, PackageIndex
from builder.common.wheels import RemoteWheel
from builder.errors import SparkBuildError, UsageError
from builder.images.bases.imagetree import preload
from builder.images.bases.pypi import requirements_of
from builder.images.subject import TRACKED
from builder.probes.stub_driver import (
    NO_DEVICE,
    UnknownMachineError,
    needed_libraries,
    shared_library,
)
from builder.proof.installed import (
    Digests,
    MadeFolder,
    damage,
    digest_of,
    drop_broken_compiled,
    install,
    is_sealed,
    note_damage,
    recorded,
)
from builder.proof.isolation import (
    SandboxUnavailable,
    call,
    checked_output,
    ended,
    environment_command,
    installs_here,
    interpreter_folders,
)
from builder.proof.replies import DispatchReply, LocalFiles, ProbeReply, reply_of
from builder.proof.variables import own_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.trees import Distribution, Tree
    from builder.common.machinecode import ElfFacts
    from builder.common.programs import Program
    from builder.common.pypi import WheelFile
    from builder.proof.trust import IsolatedRun


T = TypeVar("T", bound=ProbeReply)
A = TypeVar("A")

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


#: The packages of an environment, below its folder.
_SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
#: A cached tree that was used in this many seconds is not removed.
IN_USE = 3600.0
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
        raise UsageError(
            f"vLLM {vllm} is older than {OLDEST_VLLM}, and cannot be asked without its hardware",
            hint=f"name a release from {OLDEST_VLLM} on",
        )
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
        if self.complete and not self.python.exists():  # a link to one that was removed
            note_damage(self.root, f"its Python is gone: {os.path.realpath(self.python)}")
        MadeFolder(folder=self.root, make=self._make, expected=self._recorded).ensure()

    def _make(self, root: Path) -> None:
        need = self.requirements
        check_room([self.need])
        console.detail(f"a sandbox for {need.name}, kept in {self.root}")
        what = f"{len(need.packages)} packages, about {need.megabytes} MB"
        with console.progress(f"making a sandbox: {what}"):
            call(environment_command(root))
            install(root / "bin" / "python", need.packages, root, _SITE, into=False)
        (root / "complete").touch()

    def _recorded(self, root: Path) -> Digests:
        rows = recorded(root / _SITE, self.requirements.packages, programs=True)
        # a program is in bin/, which RECORD names from where the packages are
        return {posixpath.normpath(f"{_SITE}/{path}"): digest for path, digest in rows.items()}

    def dsl(self, packages: Mapping[str, str]) -> Path:
        """This machine's build of the target's CuTe DSL, for releases whose selection imports it.

        The environment need not exist yet, unless only its own pip can install.

        Raises:
            SandboxUnavailable: this machine's build cannot be installed.
        """
        # the order counts: of two builds for CUDA that share files the newer one has them
        wanted = sorted(
            f"{name}=={version}"
            for name, version in packages.items()
            if name.startswith("nvidia-cutlass-dsl") and name in TRACKED
        )
        tag = f"{platform.machine()}-cp{sys.version_info[0]}{sys.version_info[1]}"
        folder = cache_dir() / "sandbox" / f"dsl-{tag}-{sha256_hex(canonical_json(wanted))[:12]}"

        def make(into: Path) -> None:
            release = wanted[0].partition("==")[2] if wanted else ""
            title = f"installing the CuTe DSL {release}, up to {_DSL_MEGABYTES} MB"
            with console.progress(title):
                python = Path(sys.executable) if installs_here() else self.python
                install(python, wanted, into)

        answers = ("dispatch", "preflight")  # what compiles has a mirror of the target's own
        return MadeFolder(
            folder=folder, make=make, expected=partial(recorded, packages=wanted), answers=answers
        ).ensure()

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

    @property
    def folders(self) -> tuple[Path, ...]:
        """All that code is run from, besides the target's files."""
        return (self.sandbox.root, *self.paths)


def make(requirements: Requirements, torch: str, packages: Mapping[str, str]) -> PreparedSandbox:
    """Create missing parts: the environment, a torch, and the CuTe DSL if it is imported.

    Raises:
        SparkBuildError: a part is not available here.
    """
    own_dsl = partial(Sandbox(requirements).dsl, packages) if requirements.needs_dsl else None
    with in_background(own_dsl):
        sandbox = make_common(requirements, torch)
    dsl = (own_dsl(),) if own_dsl else ()
    folder = torch_folder(torch)
    return PreparedSandbox(sandbox=sandbox, torch=folder, paths=(*dsl, folder.folder))


def make_common(requirements: Requirements, torch: str) -> Sandbox:
    """Create what all layers of a release have in common, if it is missing: all but the CuTe DSL.

    Raises:
        SparkBuildError: a part is not available here.
    """
    sandbox = Sandbox(requirements)
    with in_background(partial(torch_folder, torch)):
        sandbox.prepare()
        wait_for_background()
    return sandbox


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
    busy: bool = False,
) -> T:
    """Run a program with an interpreter; ``timeout`` is in seconds, if ``busy`` of processor time.

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
            answer = _run_probe(tuple(command), text, timeout, program.name, busy)
        else:
            seen = (*_folders_of(request), *interpreter_folders(python), program.file())
            answer = apart.isolation.run(command, text, seen, timeout)
        result = json.loads(answer)
    except subprocess.TimeoutExpired:
        of_what = " of processor time" if busy else ""
        raise SandboxUnavailable(
            f"{program.name} took more than {timeout:.0f} s{of_what}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SandboxUnavailable(f"{program.name} gave no result: {error}") from None
    if not isinstance(result, dict):
        raise SandboxUnavailable(f"{program.name} gave no result: {answer[:80]!r} is not an object")
    reply = reply_of(result, form)
    return reply if apart is None else reply.simulating(apart.text())


#: How often a question is asked where the folders were damaged meanwhile.
_TRIES = 3


def soundly(
    ask: Callable[[], A],
    make_again: Callable[[], object],
    python: Path,
    folders: Sequence[Path],
    is_doubtful: Callable[[A], bool],
) -> A:
    """An answer of code in these folders, which were as they were made when it was given.

    ``make_again`` makes those that are damaged, before it is asked again.  A doubtful answer, such
    as an error, is believed only after each file was read.

    Raises:
        SandboxUnavailable: they are damaged again each time.
    """
    wrong, sealed = "", set[Path]()
    for _ in range(_TRIES):
        sealed.update(filter(is_sealed, folders))  # one of them may vanish meanwhile
        answer = ask()
        doubtful = is_doubtful(answer)
        wrong = damage((one for one in folders if one in sealed or is_sealed(one)), whole=doubtful)
        cut_off = drop_broken_compiled(python, folders, every=doubtful)
        if not wrong and not cut_off:
            return answer
        if cut_off:
            wrong = wrong or f"{cut_off} files that Python compiled were cut off"
            console.warn(f"verification asks again: {wrong}")
        forget_replies()
        make_again()
    raise SandboxUnavailable(
        f"what verification runs is damaged again and again: {wrong}",
        hint="look whether the disk is full: spark-build cache show",
    )


def forget_replies() -> None:
    """Let the next question run again, also one that had a reply during this process."""
    _run_probe.cache_clear()


def _folders_of(request: Mapping[str, object]) -> Iterator[Path]:
    """The local folders and files in a request."""
    named = read(request, LocalFiles)
    yield from map(
        Path, (*named.paths, *named.models, *named.extensions.values(), *named.libraries)
    )


@cache
def _run_probe(
    command: tuple[str, ...], request: str, timeout: float, name: str, busy: bool
) -> str:
    """The output of a probe.  A sandbox's paths are named by content, so the same request
    has the same reply during this process.  Temporary files of torch and the CuTe DSL are
    removed afterwards.
    """
    own = tempfile.TemporaryDirectory(prefix="spark-build-probe-", ignore_cleanup_errors=True)
    with (
        own as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=probe_environment(folder),
        ) as process,
    ):
        out, errors = ended(process, request, timeout, busy=busy)
        return checked_output(process.returncode, out, errors, name)


def probe_environment(temporary: str) -> dict[str, str]:
    """The variables of a probe that runs on this machine: it writes to its own folder alone.

    What the user installed for all Pythons is found below the real HOME.
    """
    keep = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONUSERBASE")
    env = {name: os.environ[name] for name in keep if os.environ.get(name)}
    if home := os.environ.get("HOME"):
        env.setdefault("PYTHONUSERBASE", f"{home}/.local")
    return {**env, "VLLM_NO_USAGE_STATS": "1", **own_folders(temporary)}


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


#: In a laid-out tree: the sha256 of each file, by path.
_DIGESTS = "spark-build-digests.json"


def lay_out(tree: Tree) -> Path:
    """The target's Python files as a directory, cached by content.

    Files that an earlier tree has, too, are linked, with what Python compiled of them.
    """
    paths = sorted(python_files(tree))
    folder = folder_of(tree)
    digests = {path: str(tree.digest(path)) for path in paths}

    def make(into: Path) -> None:
        preload(tree, paths)
        earlier = _earlier(folder.parent)
        for path, digest in digests.items():
            data = checked(tree, path)
            same = earlier.get((path, digest))
            if same is None or not _link_with_compiled(same, path, into, data):
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                target.write_bytes(data)
        into.mkdir(parents=True, exist_ok=True)
        (into / _DIGESTS).write_text(json.dumps(digests), "utf-8")

    os.utime(MadeFolder(folder=folder, make=make, expected=lambda _: digests).ensure())
    keep_latest(filter(Path.is_dir, folder.parent.iterdir()), most=12, unused_for=IN_USE)
    return folder


def _earlier(trees: Path) -> dict[tuple[str, str | None], Path]:
    """The latest of the earlier trees with a file, by the file's path and sha256.

    One that is damaged has none: what Python compiled there may be of a damaged source.
    """
    used: list[tuple[float, Path]] = []
    folders: dict[tuple[str, str | None], Path] = {}
    with suppress(OSError):  # another process is removing it
        found = (file for file in trees.glob(f"*/{_DIGESTS}") if is_sealed(file.parent))
        used += ((file.parent.stat().st_mtime, file) for file in found)
    for _, file in sorted(used):
        with suppress(OSError, ValueError):
            folders.update(dict.fromkeys(json.loads(file.read_bytes()).items(), file.parent))
    return folders


def _link_with_compiled(source: Path, path: str, into: Path, data: bytes) -> bool:
    """Link a file, and what Python compiled of it, which is found by the file's time and size.

    Whether it is there with these bytes; another process may be removing the source.
    """
    folder, _, name = path.rpartition("/")
    compiled = f"{folder}/__pycache__/{name[:-3]}.{sys.implementation.cache_tag}.pyc"
    with suppress(FileNotFoundError):
        _link(source / path, into / path)
        if (into / path).read_bytes() != data:
            return False
        if name.endswith(".py"):
            with suppress(FileNotFoundError):
                _link(source / compiled, into / compiled)
        return True
    return False


def checked(tree: Tree, path: str) -> bytes:
    """A file, checked against the sha256 by which it was judged.

    Raises:
        SandboxUnavailable: the bytes do not match the tree's sha256.
    """
    data = tree.read(path) or b""
    if sha256_hex(data) != tree.digest(path):
        raise SandboxUnavailable(f"{path} does not match its sha256")
    return data


# ------------------------------------------------------------------------------ torch without CUDA
#
# Linux wheels of torch on the package index are CUDA builds: with their dependencies they take
# gigabytes, and alone they do not load.  Kernel selection is host code.  So the wheel is read by
# range without the parts that selection never loads, and each linked CUDA library gets a
# generated stub (`builder.probes.stub_driver`).  If the index has a CPU build, it is used.

#: The torch version if neither the target nor vLLM's metadata has one.
DEFAULT = "2.13.0"
#: Maximum size of a CUDA build: measured 0.61 GB for 2.11.0 on x86-64 and 0.67 GB for
#: 2.10.0.
ON_DISK = 1_300_000_000
#: Version of the folders in the cache, and letters of the key in their names.
_FORM, _KEY = 1, 12
#: File in a folder with the sha256 of the RECORD that its files were held against.
_RECORD = "spark-build-record.txt"
#: Parts that selection never loads: solvers, NVSHMEM, headers, tests, compilers, static libraries.
_LEFT_OUT = re.compile(
    r"torch/lib/lib(torch_cuda_linalg|caffe2_nvrtc)\.so|torch/(include|share|test)/.*"
    r"|torch/bin/(?!torch_shm_manager).*|.*\.(a|pyi)"
)
#: Libraries that every glibc system has (PEP 600's policy for manylinux), and torch's own OpenMP.
_SYSTEM = re.compile(
    r"(lib(c|m|dl|rt|pthread|util|nsl|resolv|gcc_s|stdc\+\+|atomic|z|gomp)|ld-linux[-\w]*)\.so.*"
)
#: Those of them that a system may lack: soname and Debian package.
_CPP_RUNTIME = {"libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc-s1"}
#: Undefined symbols that the interpreter or the C++ runtime provides.
_NOT_CUDA = ("_Z", "Py", "_Py")
#: ``fallocate(2)``: keep the size, make a hole.
_PUNCH = 1 | 2


@dataclass(frozen=True, kw_only=True)
class Torch:
    """An unpacked torch: put ``folder`` on ``sys.path``."""

    folder: Path
    version: str
    #: text in the evidence
    what: str


def wanted_torch(tree: Tree, packages: Mapping[str, str]) -> str:
    """The target's torch version, else the one that its vLLM pins."""
    if named := settings.TORCH.value:
        return named
    installed = packages.get("torch")
    with suppress(InvalidVersion):
        if installed:
            return Version(installed).public
    vllm = tree.distributions().get("vllm")
    text = (tree.read(f"{vllm.info_dir}/METADATA") or b"") if vllm else b""
    pins = (
        spec.version
        for requirement in requirements_of(text)
        if requirement.name == "torch"
        for spec in requirement.specifier
        if spec.operator == "=="
    )
    return next(pins, DEFAULT)


def torch_folder(wanted: str) -> Torch:
    """An importable torch of a version for this machine and interpreter, created once.

    Raises:
        SparkBuildError: the index has none or does not respond, or the disk is full.
    """
    _check_cpp_runtime()
    index = PackageIndex(settings.TORCH_INDEX.value or None)
    file = _choose(index, wanted)
    wheel = RemoteWheel(file, index)
    key = sha256_hex(f"{file.sha256} {_FORM}".encode())[:_KEY]
    folder = cache_dir() / "sandbox" / f"torch-{file.version}-{key}"
    with locked(str(folder)):
        # what is unpacked is held against RECORD, not against the wheel's sha256: with a RECORD
        # from another index, or of an older spark-build, it is unpacked again
        if not _is_of(folder, wheel.record):
            with making(folder) as old, suppress(FileNotFoundError):
                folder.rename(old)

    def make(into: Path) -> None:
        _unpack(wheel, into)
        (into / _RECORD).write_text(wheel.record, "ascii")

    made = MadeFolder(folder=folder, make=make, expected=partial(_held_against, wheel))
    os.utime(made.ensure())
    return Torch(folder=folder, version=file.version, what=_what(file, folder, wanted))


def _held_against(wheel: RemoteWheel, folder: Path) -> Digests:
    """The sha256 of the files that were kept, but for libraries without their device code."""
    kept = {path: m.sha256 for path, m in wheel.members.items() if not _LEFT_OUT.fullmatch(path)}
    for library in (folder / "torch" / "lib").glob("*.so*"):
        if _device_code(library):
            kept.pop(library.relative_to(folder).as_posix(), None)
    return {path: digest for path, digest in kept.items() if digest}


def _is_of(folder: Path, record: str) -> bool:
    with suppress(OSError):
        return (folder / _RECORD).read_text("ascii") == record
    return False


def _check_cpp_runtime() -> None:
    """Check for the only system library besides glibc that torch needs; containers may lack it."""
    for library, package in _CPP_RUNTIME.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            raise SparkBuildError(
                f"torch needs {library}, which this machine does not have",
                hint=f"apt-get install {package}",
            ) from None


def torch_need(wanted: str) -> Need | None:
    """The disk space that `torch_folder` may need; None if that version already exists."""
    key = "[0-9a-f]" * _KEY  # and nothing after it, as one that is being unpacked has
    sandboxes = cache_dir() / "sandbox"
    if any(any(sandboxes.glob(f"torch-{wanted}{local}-{key}")) for local in ("", "+*")):
        return None
    return Need.cache(ON_DISK, f"torch {wanted}, which verification imports")


def _choose(index: PackageIndex, wanted: str) -> WheelFile:
    """The CPU build of a release, else its CUDA build; else the next release for this Python."""
    here = Platform.parse(platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
    releases = [Version(release) for release in index.releases("torch")]
    same = [release for release in releases if release.public == wanted]
    if not same:
        index.choose("torch", wanted, here)  # says what there is
    same.sort(key=lambda release: (release.local != "cpu", release.local or ""))
    newer = [r for r in releases if r > Version(wanted) and not r.is_prerelease and not r.local]
    refusal: UsageError | None = None
    for release in (*same, *newer):
        try:
            return index.choose("torch", str(release), here)
        except UsageError as error:
            refusal = refusal or error
            if settings.TORCH.is_set and release == same[-1]:
                break
    assert refusal is not None
    raise refusal


def _what(file: WheelFile, folder: Path, wanted: str) -> str:
    cuda = (folder / "torch" / "lib" / STAND_INS).is_file()
    build = "CUDA build, with generated stand-ins for CUDA's libraries" if cuda else "CPU build"
    instead = (
        ""
        if Version(file.version).public == wanted
        else f" ({wanted} has no wheel for this Python)"
    )
    return f"torch {file.version} ({build}) and this machine's Python, in a sandbox{instead}"


# --- unpacking -----------------------------------------------------------------------------------

#: File with the names of the stubs, one a line.
STAND_INS = "spark-build-stand-ins.txt"


def _unpack(wheel: RemoteWheel, folder: Path) -> None:
    paths = [path for path in wheel.members if not _LEFT_OUT.fullmatch(path)]
    size = sum(wheel.packed_size(path) for path in paths)
    total = sum(wheel.members[path].size for path in paths)
    check_room([Need.cache(total, f"{wheel.file.filename}, unpacked")])
    version = wheel.file.version
    with console.progress(f"downloading torch {version} for verification", size) as bar:
        wheel.unpack(paths, folder, bar)
    metadata = (folder / wheel.info_dir / "METADATA").read_bytes()
    if _needs_cuda(metadata):
        write_stand_ins(folder)


def _needs_cuda(metadata: bytes) -> bool:
    """Whether torch's metadata requires CUDA packages on this machine."""
    return any(
        requirement.name.startswith(("nvidia-", "cuda-"))
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        for requirement in requirements_of(metadata)
    )


# --- stand-ins -----------------------------------------------------------------------------------


def write_stand_ins(folder: Path) -> list[str]:
    """Write a stub for each CUDA library that an unpacked torch links; returns their names.

    Raises:
        SparkBuildError: a library of torch cannot be read, or this machine's architecture is
        unsupported.
    """
    place = folder / "torch" / "lib"
    libraries = sorted(path for path in place.iterdir() if ".so" in path.name)
    wanted = wanted_of_cuda({path.name: read_elf(path) for path in libraries})
    for soname, symbols in wanted.items():
        try:
            data = shared_library(soname, symbols, platform.machine(), symbols, NO_DEVICE)
        except UnknownMachineError as error:
            raise SparkBuildError(str(error)) from None
        (place / soname).write_bytes(data)
    for path in libraries:
        drop_device_code(path)
    (place / STAND_INS).write_text("".join(f"{name}\n" for name in wanted), "utf-8")
    return list(wanted)


def wanted_of_cuda(facts: Mapping[str, ElfFacts]) -> dict[str, dict[str, str]]:
    """Missing libraries that these need, each with the symbols that it must define.

    A symbol has its required version, or "".  A symbol without a library is assigned to
    the missing library with the same prefix, such as ``ncclAllGather`` to ``libnccl.so.2``.
    """
    exported = frozenset[str]().union(*(fact.exported for fact in facts.values()))
    wanted: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for fact in facts.values():
        missing = [n for n in fact.needed if n not in facts and not _SYSTEM.fullmatch(n)]
        for soname in missing:
            wanted[soname]  # also one that nothing is asked of
        for symbol, (library, version) in fact.undefined.items():
            if library in missing:
                wanted[library][symbol] = version
            elif not missing or library or symbol in exported:
                continue
            elif not symbol.startswith(_NOT_CUDA):
                wanted[_owner(symbol, missing)].setdefault(symbol, "")
    return {soname: wanted[soname] for soname in sorted(wanted)}


def _owner(symbol: str, missing: list[str]) -> str:
    stems = {soname: soname.removeprefix("lib").split(".")[0].lower() for soname in missing}
    fitting = [soname for soname in missing if symbol.lower().startswith(stems[soname])]
    return max(fitting, key=lambda soname: len(stems[soname]), default=missing[0])


def drop_device_code(path: Path) -> None:
    """Free the disk space of a library's kernels, which are not used here.

    The file keeps its size, and the hole reads as zeros.  If the file system does not support
    holes, the file is unchanged.
    """
    if place := _device_code(path):
        with path.open("r+b") as stream:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(stream.fileno(), _PUNCH, *map(ctypes.c_int64, place))


def _device_code(path: Path) -> tuple[int, int] | None:
    """Where a library's kernels begin in its file, and their size; None if it has none."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with suppress(OSError, ELFError), path.open("rb") as stream:
        section: Any = ELFFile(stream).get_section_by_name(".nv_fatbin")
        if section is not None:
            return section["sh_offset"], section["sh_size"]
    return None


# ------------------------------------------------------------------------------------ the CuTe DSL
#
# Two DSL wheels may have the same path, and layers edit its Python; the effective file decides
# what is compiled.  So the mirror copies the target file by file: Python comes from the target, and
# each shared library from this machine's build of the wheel that the target's library is from.

DSL = "nvidia-cutlass-dsl"
_PACKAGE = "nvidia_cutlass_dsl"
_CUDA_12, _CUDA_13 = f"{DSL}-libs-cu12", f"{DSL}-libs-cu13"
#: Static libraries and headers, used only for ahead-of-time builds.
_UNUSED = (".a", ".h", ".pyi")
#: ``_cutlass_ir.cpython-312-aarch64-linux-gnu.so`` -> ``_cutlass_ir.so``
_ABI = re.compile(r"\.cpython-\d+-\w+-linux-gnu(?=\.so$)")
#: Number of cached mirrors; each has its own Python files and shares the large libraries.
_KEEP = 12


class NoDsl(SparkBuildError):
    """The target has no CuTe DSL."""


class CannotMirror(SparkBuildError):
    """A file of the target's DSL has no counterpart for this machine."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A shared library of the target: its path and its wheel."""

    path: str
    distribution: str
    version: str


@dataclass(kw_only=True)
class Contents:
    """The contents of a mirror."""

    #: path -> sha256 in the target
    texts: dict[str, str] = field(default_factory=dict)
    libraries: list[Origin] = field(default_factory=list)


def neutral(path: str) -> str:
    """A library's path without its interpreter and machine tags."""
    return _ABI.sub("", path)


def dsl_distributions(tree: Tree) -> dict[str, Distribution]:
    """The DSL's distributions in a tree, by name."""
    every = tree.distributions().values()
    return {
        dist.name: dist
        for dist in every
        if dist.name.startswith(DSL) and dist.name in TRACKED  # libraries come from the index
    }


def contents_of(tree: Tree) -> Contents:
    """The target's DSL, file by file.

    Raises:
        NoDsl: the target has none.
        CannotMirror: a shared library is not from one of the target's wheels.
    """
    dists = dsl_distributions(tree)
    if DSL not in dists:
        raise NoDsl(f"{DSL} is not in the target")
    rows = {
        name: {row.path: row.sha256 for row in record_of(tree, dist)}
        for name, dist in dists.items()
    }
    newest = None if _CUDA_13 not in dists else _CUDA_12
    contents = Contents()
    for path in _files(tree, dists):
        digest = tree.digest(path)
        if not path.endswith(".so"):
            contents.texts[path] = str(digest)
            continue
        owners = sorted(name for name, record in rows.items() if record.get(path) == digest)
        if not owners:
            raise CannotMirror(
                f"{path} matches no {DSL} wheel of the target, so it cannot be adapted to this "
                f"machine"
            )
        if owners != [newest]:
            owner = dists[owners[-1]]
            contents.libraries.append(
                Origin(path=path, distribution=owner.name, version=owner.version)
            )
    return contents


def texts_of(tree: Tree) -> list[str]:
    """The target's own files in a mirror.

    Raises:
        NoDsl: the target has none.
        CannotMirror: a shared library is not from one of the target's wheels.
    """
    return sorted(contents_of(tree).texts)


def _files(tree: Tree, dists: Mapping[str, Distribution]) -> Iterator[str]:
    pending = [n for n in tree.children("") if n.startswith(_PACKAGE) and n.endswith(".pth")]
    pending += [_PACKAGE, *(f"{dist.info_dir}/METADATA" for dist in dists.values())]
    while pending:
        path = pending.pop()
        children = tree.children(path)
        pending.extend(f"{path}/{name}" for name in children if name != "__pycache__")
        if not children and not path.endswith(_UNUSED) and tree.digest(path) is not None:
            yield path


class Wheels:
    """This machine's builds of the target's DSL wheels."""

    def __init__(self, dists: Mapping[str, Distribution], index: PackageIndex) -> None:
        here = Target.here()
        self.platform = Platform.parse(here.platform, here.python)
        self._dists = dists
        self._index = index
        self._opened: dict[str, RemoteWheel] = {}

    def of(self, distribution: str) -> RemoteWheel:
        """One of them, with the target's version."""
        if distribution not in self._opened:
            version = self._dists[distribution].version
            file = self._index.choose(distribution, version, self.platform)
            self._opened[distribution] = RemoteWheel(file, self._index)
        return self._opened[distribution]

    def counterpart(self, origin: Origin) -> tuple[str, str]:
        """Path and sha256 of a library in this machine's build of its wheel.

        Raises:
            CannotMirror: the build has no such library.
        """
        members = self.of(origin.distribution).members
        for path, member in members.items():
            if neutral(path) == neutral(origin.path) and member.sha256:
                return path, member.sha256
        raise CannotMirror(
            f"{origin.distribution} {origin.version} for {self.platform.oci} has no "
            f"{neutral(origin.path)}"
        )

    def library(self, origin: Origin) -> Path:
        """The library's file, cached by content."""
        path, digest = self.counterpart(origin)
        place = cache_dir() / "dsl" / "libraries" / digest
        if digest_of(place) != digest:
            place.parent.mkdir(parents=True, exist_ok=True)
            wheel = self.of(origin.distribution).download()
            with making(place) as partial:
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(path) as source,
                    partial.open("wb") as target,
                ):
                    shutil.copyfileobj(source, target, 1 << 20)
                partial.chmod(0o755)
                partial.replace(place)
        return place


def mirror(tree: Tree, index: PackageIndex | None = None) -> Path:
    """A directory with the target's DSL for this machine, for ``sys.path``.

    Raises:
        NoDsl: the target has none.
        CannotMirror: a file of it has no counterpart here.
    """
    contents = contents_of(tree)
    wheels = Wheels(dsl_distributions(tree), index or PackageIndex())
    libraries = {wheels.counterpart(origin): origin for origin in contents.libraries}
    key = sha256_hex(canonical_json([sorted(contents.texts.items()), sorted(libraries)]))
    folder = cache_dir() / "dsl" / "mirrors" / key[:24]

    def make(into: Path) -> None:
        console.detail(f"extracting the target's CuTe DSL for this machine in {folder}")
        for (path, _), origin in libraries.items():
            _link(wheels.library(origin), into / path)
        preload(tree, sorted(contents.texts))
        for path in contents.texts:
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            data = tree.read(path) or b""
            if sha256_hex(data) != contents.texts[path]:
                raise CannotMirror(f"{path} does not match its sha256")
            target.write_bytes(data)

    with locked(str(cache_dir() / "dsl")):  # one lock: what one run prunes, another may need
        known, expected = folder.exists(), {**contents.texts, **dict(libraries.keys())}
        answers = ("codegen", "numbers", "launches")
        os.utime(
            MadeFolder(
                folder=folder, make=make, expected=lambda _: expected, answers=answers
            ).ensure()
        )
    if not known:
        _prune_mirrors(folder.parent)
    return folder


@dataclass(frozen=True, kw_only=True)
class WithDsl:
    """A sandbox with the CuTe DSL of a tree and a torch; the tree's files may not be laid out yet.

    The names of the folders are digests of their contents.
    """

    sandbox: Sandbox
    torch: Torch
    dsl: Path
    rest: Path

    @classmethod
    def prepare(cls, tree: Tree, packages: Mapping[str, str]) -> Self:
        """Make what is missing.

        Raises:
            UsageError: there is no sandbox for this release.
            NoDsl: the tree has no CuTe DSL.
            CannotMirror: a file of it has no counterpart here.
        """
        current = {**packages, **versions(tree)}
        sandbox = Sandbox(requirements_for(current["vllm"]))
        dsl, rest = mirror(tree), folder_of(tree)
        sandbox.prepare()
        torch = torch_folder(wanted_torch(tree, current))
        return cls(sandbox=sandbox, torch=torch, dsl=dsl, rest=rest)

    @property
    def folders(self) -> tuple[Path, ...]:
        """All that code is run from."""
        return (self.sandbox.root, self.torch.folder, self.dsl, self.rest)

    @property
    def inputs(self) -> list[str]:
        """What decides a reply, besides the request."""
        return [path.name for path in self.folders]

    @property
    def settings(self) -> dict[str, object]:
        """The fields that it adds to a request."""
        paths = [str(self.dsl), str(self.rest), str(self.torch.folder)]
        return {"paths": paths, "pretend_triton": True}


def own_files(tree: Tree) -> list[str]:
    """The files of a tree that run in such a sandbox.

    Raises:
        NoDsl: the tree has no CuTe DSL.
        CannotMirror: a shared library is not from one of its wheels.
    """
    return [*python_files(tree), *texts_of(tree)]


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _prune_mirrors(parent: Path) -> None:
    keep_latest(filter(Path.is_dir, parent.iterdir()), most=_KEEP)
    in_use = {file.stat().st_ino for file in parent.rglob("*.so")}
    for library in (parent.parent / "libraries").iterdir():
        if library.stat().st_ino not in in_use and not library.name.endswith(".part"):
            library.unlink(missing_ok=True)


# -------------------------------------------------------------------------------- vLLM's operators
#
# From 0.20.0 on vLLM has the host functions for kernel selection in a module that is linked
# only against torch's stable ABI, so this machine's build of it loads with a CPU build of torch,
# with generated stubs for the driver and for torch's CUDA part.  The download has 7 to 90 MB,
# so it is not the default.

MODULE = "vllm._C_stable_libtorch"
#: The first release with host functions in that module.
SINCE = (0, 20)
_MEMBER = "vllm/_C_stable_libtorch.abi3.so"
_RUNTIME = re.compile(r"libcudart\.so\.(\d+)")


def wanted(vllm: str) -> bool:
    """Whether the user requested it, and the release has it."""
    parts = [int(word) for word in re.findall(r"\d+", vllm)[:2]]
    return settings.REAL_EXTENSIONS.value == "1" and tuple(parts) >= SINCE


def operators(vllm: str, index: PackageIndex | None = None) -> LocalFiles:
    """The files for the probe: the CUDA runtime library, then the module.

    Raises:
        SparkBuildError: the index has no build for this machine, or does not respond.
    """
    index = index or PackageIndex()
    here = Platform.parse(platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
    wheel = RemoteWheel(index.choose("vllm", vllm, here), index)
    if _MEMBER not in wheel.members:
        raise SparkBuildError(f"{wheel.file.filename} has no {_MEMBER}")
    module = _cached_file(wheel, _MEMBER)
    needed = " ".join(needed_libraries(str(module)))
    match = _RUNTIME.search(needed)
    libraries = (str(_runtime(match[0], match[1], here, index)),) if match else ()
    return LocalFiles(extensions={MODULE: str(module)}, libraries=libraries)


def _runtime(soname: str, major: str, here: Platform, index: PackageIndex) -> Path:
    """The CUDA runtime library of a major version, from its wheel."""
    releases = [v for v in index.releases("nvidia-cuda-runtime") if v.split(".")[0] == major]
    if not releases:
        raise SparkBuildError(f"the package index has no wheel with {soname}")
    wheel = RemoteWheel(index.choose("nvidia-cuda-runtime", releases[-1], here), index)
    member = next((path for path in wheel.members if path.endswith(f"/{soname}")), None)
    if member is None:
        raise SparkBuildError(f"{wheel.file.filename} has no {soname}")
    return _cached_file(wheel, member)


def _cached_file(wheel: RemoteWheel, member: str) -> Path:
    """A file of a wheel in the cache, with its own name."""
    path = cache_dir() / "operators" / wheel.record[:24] / member.rpartition("/")[2]
    if not path.is_file():
        write_atomically(path, wheel.read(member))
    return path
