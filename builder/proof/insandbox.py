"""Runs vLLM from files that are not installed, in a sandbox."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from builder.applier.trees import OverlayTree, versions
from builder.common.document import plain
from builder.common.programs import DISPATCH
from builder.errors import SparkBuildError
from builder.proof import operators
from builder.proof.codegen import sandbox_compiler
from builder.proof.installer import SandboxUnavailable
from builder.proof.interpreters import Probes
from builder.proof.launches import sandbox_launcher
from builder.proof.replies import DispatchReply, LocalFiles, MalformedReply
from builder.proof.results import Results
from builder.proof.sandbox import (
    Sandbox,
    folder_of,
    lay_out,
    make,
    python_files,
    requirements_for,
)
from builder.proof.torchfolder import wanted_torch
from builder.proof.trust import TrustedSources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.applier.trees import Tree
    from builder.common.model.plan import BuildPlan
    from builder.images.rootfs.base import Base
    from builder.proof.replies import DispatchRequest
    from builder.proof.sandbox import PreparedSandbox


def in_sandbox(base: Base, trust: TrustedSources) -> Callable[[Tree, Mapping[str, str]], Probes]:
    """Queries vLLM in a sandbox, which has no environment variables of its own."""
    packages = dict(base.identity.packages)

    def asking(tree: Tree, _env: Mapping[str, str]) -> Probes:
        return Probes(
            ask=SandboxProbe(tree, packages, trust),
            compile=sandbox_compiler(tree, packages, trust),
            launch=sandbox_launcher(tree, packages, trust),
        )

    return asking


#: Cached replies, except those of isolated runs; one has 10 to 100 kB.
RESULTS = Results("dispatch", (DISPATCH,), 400)


#: Errors whose cause may be this machine, so that another try may have another result.
_OF_THE_MACHINE = ("MemoryError", "OSError")


def _of_the_files(reply: DispatchReply) -> bool:
    """Whether the target's files alone decided the reply."""
    errors = [answer.error for answer in (*reply.answers, *reply.choices) if answer.error]
    return reply.fatal is None and all(one.type not in _OF_THE_MACHINE for one in errors)


class SandboxProbe:
    """Queries the vLLM of a tree in a sandbox, which is created on first use.

    A sandbox separates versions; it does not protect this machine: files unknown to ``trust``
    run isolated.
    """

    def __init__(
        self, tree: Tree, packages: Mapping[str, str], trust: TrustedSources | None = None
    ) -> None:
        self._tree = tree
        self._trust = trust or TrustedSources()
        self._packages = {**packages, **versions(tree)}

    def maker(self) -> Callable[[], PreparedSandbox]:
        """A function that prepares the sandbox without reading the tree: another thread may run it.

        Raises:
            UsageError: there is none for this release.
        """
        requirements = requirements_for(self._packages["vllm"])
        return partial(make, requirements, wanted_torch(self._tree, self._packages), self._packages)

    def __call__(self, request: DispatchRequest) -> DispatchReply:
        try:
            return self._ask(request)
        except MalformedReply:
            raise
        except SparkBuildError as error:
            hint = f"; try: {error.hint}" if error.hint else ""
            raise SandboxUnavailable(f"{error}{hint}") from None

    def _ask(self, request: DispatchRequest) -> DispatchReply:
        release = self._packages["vllm"]
        make_it = self.maker()
        apart = self._trust.apart(self._tree, python_files(self._tree))
        if not Sandbox(requirements_for(release)).complete:
            lay_out(self._tree)  # while it may still be made beside this
        made = make_it()
        real = operators.operators(release) if operators.wanted(release) else LocalFiles()
        # every path is named by a digest of its contents
        full = {
            **plain(request),
            **plain(real),
            "paths": [str(folder_of(self._tree)), *map(str, made.paths)],
            "pretend_nvcc": "flashinfer-cubin" not in self._packages,
            "pretend_triton": made.sandbox.requirements.pretend_triton,
        }
        inputs = [str(made.sandbox.python), full]
        reply = None if apart else RESULTS.get(inputs, DispatchReply)
        if reply is None:
            lay_out(self._tree)
            reply = made.sandbox.ask(full, apart=apart)
            if not apart and _of_the_files(reply):
                RESULTS.put(inputs, reply)
        return reply.simulating(made.torch.what)


def sandbox_maker(plan: BuildPlan, tree: Tree) -> Callable[[], PreparedSandbox] | None:
    """The sandbox to prepare before an image is built, or None."""
    patched = OverlayTree(tree)
    patched.update(plan.changes)
    try:
        return SandboxProbe(patched, plan.base.packages).maker()
    except SparkBuildError:  # which the level itself will say
        return None
