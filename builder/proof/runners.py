"""Runs probes on a target's files: in containers of its image, in its environment, in a sandbox.

A target without one of its layers does not exist on disk.  In a container the changed files are put
over those of the image; for a local environment they are in a folder of links that replaces its
site-packages; a sandbox has the files of any tree.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from builder.applier.states import Target
from builder.applier.trees import OverlayTree, versions
from builder.common.console import console
from builder.common.document import Part, plain
from builder.common.programs import CODEGEN, DISPATCH, IN_CONTAINER
from builder.common.results import Results
from builder.errors import SparkBuildError
from builder.proof import sandbox
from builder.proof.codegen import compile_in_sandbox
from builder.proof.gpuoptions import GpuOptions
from builder.proof.installed import damage, drop_broken_compiled, is_sealed
from builder.proof.isolation import SandboxUnavailable
from builder.proof.kernels import launch_in_sandbox
from builder.proof.ongpu import run_beside, run_in_container
from builder.proof.replies import (
    CODEGEN_TIMEOUT,
    Ask,
    CodegenReply,
    CodegenRequest,
    DispatchReply,
    DispatchRequest,
    LocalFiles,
    MalformedReply,
    ProbeReply,
    of_the_files,
    reply_of,
)
from builder.proof.sandbox import (
    NoDsl,
    Sandbox,
    ask_probe,
    folder_of,
    forget_replies,
    lay_out,
    make,
    make_common,
    python_files,
    requirements_for,
    soundly,
    torch_need,
    wanted_torch,
)
from builder.proof.target import Refusal
from builder.proof.trust import TrustedSources
from builder.proof.variables import for_a_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO

    from builder.applier.trees import Changes, Tree
    from builder.common.plan import PlanDocument
    from builder.common.programs import Program
    from builder.images.subject import Subject
    from builder.probes.dispatch_expect import Failure
    from builder.proof.checks import VerifierDocument
    from builder.proof.kernels import Replies
    from builder.proof.sandbox import PreparedSandbox
    from builder.proof.target import Runner
    from builder.proof.trust import IsolatedRun


Request = TypeVar("Request", "DispatchRequest", "CodegenRequest")
Asked = TypeVar("Asked")
Reply = TypeVar("Reply")
Answer = TypeVar("Answer", bound="ProbeReply")

NO_GPU = "only an image, or an environment of this machine, can run on a GPU"
NO_LAUNCH = "kernels are launched from released wheels and layouts (pypi:, oci:), not from here"


def attempt(probe: Callable[[Asked], Reply], request: Asked) -> Reply | Refusal:
    """A probe's reply, or why it did not run; faults of the files are raised."""
    try:
        return probe(request)
    except (MalformedReply, NoDsl):
        raise
    except SparkBuildError as error:
        return Refusal.of(error)


def runner_of(
    base: Subject, trust: TrustedSources | None = None, gpu: GpuOptions | None = None
) -> Runner:
    """Runs probes on a base that is no image in a Docker Engine."""
    trust = trust or TrustedSources(platform=base.identity.platform)
    sandbox = InSandbox(base.tree, base.identity.packages, trust)
    python = own_python(base)
    if python is None:
        return sandbox
    return BesidePython(base=base, python=python, sandbox=sandbox, gpu=gpu or GpuOptions())


def own_python(base: Subject) -> Path | None:
    """The interpreter of a local environment's directory."""
    if not base.identity.is_installed:
        return None
    python = Path(base.identity.site_packages).parents[2] / "bin" / "python"
    here = base.identity.platform.target.platform == Target.here().platform
    return python if here and python.exists() else None


# ------------------------------------------------------------------------------------- in a sandbox


#: Cached replies, except those of isolated runs; one has 10 to 100 kB.
RESULTS = Results("dispatch", (DISPATCH,), 400)


def _of_the_files(reply: DispatchReply) -> bool:
    """Whether the target's files alone decided the reply."""
    return reply.fatal is None and all(map(of_the_files, _errors(reply)))


def _errors(reply: DispatchReply) -> list[Failure]:
    answers = (*reply.answers, *reply.choices)
    return [error for error in (reply.fatal, *(one.error for one in answers)) if error]


class InSandbox:
    """Runs probes on a tree in a sandbox, which is created on first use.

    A sandbox separates versions; it does not protect this machine: files unknown to ``trust``
    run isolated.  It has no environment variables of its own.
    """

    def __init__(
        self,
        tree: Tree,
        packages: Mapping[str, str],
        trust: TrustedSources | None = None,
        no_gpu: str = NO_GPU,
    ) -> None:
        self._tree = tree
        self._trust = trust or TrustedSources()
        self._packages = {**packages, **versions(tree)}
        self._no_gpu = no_gpu

    def maker(self) -> Callable[[], PreparedSandbox]:
        """A function that prepares the sandbox without reading the tree: another thread may run it.

        Raises:
            UsageError: there is none for this release.
        """
        requirements = requirements_for(self._packages["vllm"])
        return partial(make, requirements, wanted_torch(self._tree, self._packages), self._packages)

    def common_maker(self) -> Callable[[], Sandbox] | None:
        """The same for what layers do not change, before there is a plan; None if it exists.

        Raises:
            UsageError: there is none for this release.
        """
        requirements = requirements_for(self._packages["vllm"])
        torch = wanted_torch(self._tree, self._packages)
        if Sandbox(requirements).complete and torch_need(torch) is None:
            return None
        return partial(make_common, requirements, torch)

    def dispatch(self, request: DispatchRequest) -> DispatchReply | Refusal:
        """See `Runner`."""
        return attempt(self._select, request)

    def doubt(self, request: DispatchRequest) -> DispatchReply | Refusal | None:
        """See `DoubtingRunner`."""
        return attempt(self._doubt, request)

    def _doubt(self, request: DispatchRequest) -> DispatchReply | None:
        prepared = self.maker()()
        folders = [one for one in (*prepared.folders, folder_of(self._tree)) if is_sealed(one)]
        wrong = damage(folders, whole=True)
        cut_off = drop_broken_compiled(prepared.sandbox.python, folders)
        if not wrong and not cut_off and not console.verbose:
            return None
        forget_replies()
        return self._select(request, fresh=True)  # with --verbose, to show what the probe prints

    def ahead(self, request: DispatchRequest) -> Callable[[], object] | None:
        """What another thread may do before `dispatch` is called, whose answer it makes known.

        It reads the tree now.  None where a file is unknown, so that code must run isolated.

        Raises:
            SparkBuildError: there is no sandbox for this release, or the tree cannot be read.
        """
        make_it = self.maker()
        if self._trust.unknown(self._tree, python_files(self._tree)):
            return None
        folder = lay_out(self._tree)
        return lambda: self._asked(request, make_it, folder, laid_out=True)

    def _select(self, request: DispatchRequest, *, fresh: bool = False) -> DispatchReply:
        make_it = self.maker()
        apart = self._trust.apart(self._tree, python_files(self._tree))
        if not Sandbox(requirements_for(self._packages["vllm"])).complete:
            lay_out(self._tree)  # while it may still be made beside this
        return self._asked(request, make_it, folder_of(self._tree), apart, fresh=fresh)

    def _asked(
        self,
        request: DispatchRequest,
        make_it: Callable[[], PreparedSandbox],
        folder: Path,
        apart: IsolatedRun | None = None,
        *,
        laid_out: bool = False,
        fresh: bool = False,
    ) -> DispatchReply:
        """The reply of a tree's code, which is laid out in a folder if it must be asked."""
        prepared = make_it()
        release = self._packages["vllm"]
        request, left_out = self.allowed(request, apart=apart is not None)
        real = sandbox.operators(release) if sandbox.wanted(release) else LocalFiles()
        # every path is named by what is in it
        full = {
            **plain(request),
            **plain(real),
            "paths": [str(folder), *map(str, prepared.paths)],
            "pretend_nvcc": "flashinfer-cubin" not in self._packages,
            "pretend_triton": prepared.sandbox.requirements.pretend_triton,
        }
        inputs = [str(prepared.sandbox.python), full]
        reply = None if apart or fresh else RESULTS.get(inputs, DispatchReply)

        def ask() -> DispatchReply:
            if not laid_out:
                lay_out(self._tree)
            return prepared.sandbox.ask(full, apart=apart)

        if reply is None or not _of_the_files(reply):
            folders = (*prepared.folders, folder)
            python = prepared.sandbox.python
            reply = soundly(ask, make_it, python, folders, lambda _: False)
            if not _of_the_files(reply):
                forget_replies()  # this machine may do better the next time
            elif not apart:
                RESULTS.put(inputs, reply)
        return reply.simulating(prepared.torch.what, *left_out)

    def allowed(self, request: Request, *, apart: bool) -> tuple[Request, tuple[str, ...]]:
        """A request with the variables that a process gets, and what is said of the others.

        Raises:
            SandboxUnavailable: one has a value that is not passed.
        """
        variables = for_a_process(request.env, self._trust.sets, apart=apart)
        asked = structs.replace(request, env=dict(variables.passed))
        if isinstance(asked, DispatchRequest) and not apart:
            asked = structs.replace(asked, ask=tuple(map(self._unsetting, asked.ask)))
        return asked, variables.left_out

    def _unsetting(self, ask: Ask) -> Ask:
        """A query that unsets only what `allowed` lets it."""
        if ask.env is None:
            return ask
        passed = for_a_process(ask.env, self._trust.sets, apart=False).passed
        return structs.replace(ask, env=dict.fromkeys(passed))

    def compile(self, request: CodegenRequest) -> CodegenReply | Refusal:
        """See `Runner`."""
        return attempt(self._in_sandbox(compile_in_sandbox), request)

    def launch(self, request: Mapping[str, Any]) -> Replies | Refusal:
        """See `Runner`."""
        return attempt(self._in_sandbox(launch_in_sandbox), request)

    def _in_sandbox(self, run: Callable[..., Reply]) -> Callable[[Any], Reply]:
        return partial(run, tree=self._tree, packages=self._packages, trust=self._trust)

    def on_gpu(self, plan: PlanDocument, level: str) -> VerifierDocument | Refusal:  # noqa: ARG002
        """See `Runner`."""
        return Refusal(self._no_gpu)

    def on(self, tree: Tree, env: Mapping[str, str]) -> InSandbox:  # noqa: ARG002
        """See `Runner`."""
        return InSandbox(tree, self._packages, self._trust, self._no_gpu)


# ------------------------------------------------------------------------- in a local environment


@dataclass(frozen=True, kw_only=True)
class BesidePython:
    """Runs probes with an environment's interpreter and packages, also with some files replaced."""

    base: Subject
    python: Path
    sandbox: InSandbox
    gpu: GpuOptions = field(default_factory=GpuOptions)
    #: the files and the environment in place of the environment's own
    tree: Tree | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def dispatch(self, request: DispatchRequest) -> DispatchReply | Refusal:
        """See `Runner`."""
        return attempt(
            partial(self._run, form=DispatchReply, timeout=300, program=DISPATCH), request
        )

    def compile(self, request: CodegenRequest) -> CodegenReply | Refusal:
        """See `Runner`."""
        run = partial(self._run, form=CodegenReply, timeout=CODEGEN_TIMEOUT, program=CODEGEN)
        return attempt(run, request)

    def _run(
        self, request: Request, form: type[Answer], timeout: float, program: Program
    ) -> Answer:
        if self.tree is None:
            request, left_out = self.sandbox.allowed(request, apart=False)
            reply = ask_probe(self.python, plain(request), form, timeout, program)
            return reply.simulating(*left_out)
        root = Path(self.base.identity.site_packages)
        with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
            link_out(root, net_changes(self.tree), Path(scratch))
            unset = unsetting(request, self.base.identity.env, self.env)
            request, left_out = self.sandbox.allowed(unset, apart=False)
            asked = {**plain(request), "paths": [scratch]}
            reply = ask_probe(self.python, asked, form, timeout, program, instead_of=root)
            return reply.simulating(*left_out)

    def launch(self, request: Mapping[str, Any]) -> Replies | Refusal:
        """See `Runner`: the launches are recorded in a sandbox."""
        return self.sandbox.launch(request)

    def on_gpu(self, plan: PlanDocument, level: str) -> VerifierDocument | Refusal:
        """See `Runner`."""
        return attempt(lambda name: run_beside(self.python, plan, name, self.gpu), level)

    def on(self, tree: Tree, env: Mapping[str, str]) -> BesidePython:
        """See `Runner`."""
        return replace(self, tree=tree, env=env, sandbox=self.sandbox.on(tree, env))


# ---------------------------------------------------------------------- in containers of an image


@dataclass(frozen=True, kw_only=True)
class InContainer:
    """Runs probes in containers of an image, also with some files replaced."""

    base: Subject
    #: the image, as a Docker Engine knows it
    name: str
    gpu: GpuOptions = field(default_factory=GpuOptions)
    tree: Tree | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def dispatch(self, request: DispatchRequest) -> DispatchReply | Refusal:
        """See `Runner`."""
        return attempt(partial(self._run, form=DispatchReply, program=DISPATCH), request)

    def compile(self, request: CodegenRequest) -> CodegenReply | Refusal:
        """See `Runner`."""
        return attempt(partial(self._run, form=CodegenReply, program=CODEGEN), request)

    def _run(self, request: Request, form: type[Answer], program: Program) -> Answer:
        if self.tree is None:
            return ask_in_container(self.base, request, form, program)
        asked = unsetting(request, self.base.identity.env, self.env)
        return ask_in_container(self.base, asked, form, program, net_changes(self.tree))

    def launch(self, request: Mapping[str, Any]) -> Replies | Refusal:  # noqa: ARG002
        """See `Runner`."""
        return Refusal(NO_LAUNCH)

    def on_gpu(self, plan: PlanDocument, level: str) -> VerifierDocument | Refusal:
        """See `Runner`."""
        python = self.base.identity.interpreter
        return attempt(
            lambda name: run_in_container(self.name, python, plan, name, self.gpu), level
        )

    def on(self, tree: Tree, env: Mapping[str, str]) -> InContainer:
        """See `Runner`."""
        return replace(self, tree=tree, env=env)


# ----------------------------------------------------------------- files that do not exist on disk


def net_changes(tree: Tree) -> Changes:
    """The changes of a tree relative to its base tree."""
    merged: Changes = {}
    while isinstance(tree, OverlayTree):
        merged = {**tree.changes, **merged}
        tree = tree.base
    return {
        path: content
        for path, content in merged.items()
        if tree.digest(path) != (None if content is None else content.sha256)
    }


def unsetting(request: Request, outer: Mapping[str, str], env: Mapping[str, str]) -> Request:
    """A request that unsets variables which the queried files must not see."""
    off = dict.fromkeys(name for name in outer if name not in env)
    return structs.replace(request, env={**off, **request.env})


# ------------------------------------------------------------------------- a local environment


def link_out(root: Path, changes: Changes, into: Path) -> None:
    """A directory tree with changes, with links to all unchanged parts."""
    folders = {Path(path).parents[depth] for path in changes for depth in range(path.count("/"))}
    for folder in sorted({Path(), *folders}):
        (into / folder).mkdir(exist_ok=True)
        for entry in _entries(root / folder):
            path = folder / entry.name
            if path not in folders and path.as_posix() not in changes:
                (into / path).symlink_to(entry.path)
    for name, content in changes.items():
        if content is not None:
            (into / name).write_bytes(content.read())
            (into / name).chmod(content.mode)
    for folder in sorted(folders, reverse=True):  # an empty one would be a namespace package
        if not any((into / folder).iterdir()):
            (into / folder).rmdir()


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from entries


# ---------------------------------------------------------------------------- an image's container


#: Runs the program in a container with its request from a variable.  For ``-c`` the first entry of
#: ``sys.path`` is the current folder, whose files are not to be run.
_STARTER = (
    f"import io, os, runpy, sys; sys.path[0] = {IN_CONTAINER!r}; "
    "sys.stdin = io.StringIO(os.environ.pop('SPARK_BUILD_REQUEST')); "
    f"runpy.run_path({IN_CONTAINER!r}, run_name='__main__')"
)
#: Files of the image to hide, only in this temporary container.
_REMOVER = (
    "import json, os; [os.path.lexists(p) and os.remove(p) "
    "for p in json.loads(os.environ.pop('SPARK_BUILD_GONE'))]; "
)


def ask_in_container(
    base: Subject,
    request: Part,
    form: type[Answer],
    program: Program,
    changes: Changes | None = None,
) -> Answer:
    """Query the image's own interpreter, vLLM and extension modules, without network and GPU.

    Raises:
        SandboxUnavailable: the probe gave no result.
        MalformedReply: its result is malformed.
    """
    from builder.images.engines import docker

    site = base.identity.site_packages
    gone = [f"{site}/{path}" for path, content in (changes or {}).items() if content is None]
    env = {
        "SPARK_BUILD_REQUEST": json.dumps(plain(request)),
        **({"SPARK_BUILD_GONE": json.dumps(gone)} if gone else {}),
    }
    command = [base.identity.interpreter, "-B", "-c", (_REMOVER if gone else "") + _STARTER]
    client = docker.connect()
    try:
        with tempfile.TemporaryFile() as files:
            if changes:
                write_tar(files, site, changes)
            output = docker.run(
                client,
                base.identity.ref,
                command,
                env=env,
                user="0" if gone else None,
                files=files if changes else None,
                program=program,
            )
        result = json.loads(output)
    except (ValueError, RecursionError) as error:
        raise SandboxUnavailable(f"the probe gave no result in the container: {error}") from None
    finally:
        client.close()
    return reply_of(result, form)


def write_tar(out: IO[bytes], site: str, changes: Changes) -> None:
    """Changed files as a tar for the root of a container.

    Their timestamp is 0, so that no compiled file matches them.
    """
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content in sorted(changes.items()):
            if content is None:
                continue
            data = content.read()
            info = tarfile.TarInfo(f"{site}/{path}".lstrip("/"))
            info.size, info.mode, info.mtime = len(data), content.mode, 1
            tar.addfile(info, io.BytesIO(data))
    out.seek(0)
