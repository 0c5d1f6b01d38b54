"""The op ``compile``: adds kernels that a base lacks, in an extension wheel."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from builder.applier.compiled import Compiled, ModuleCode
from builder.applier.machinecode import ABSENT, EXTENSION_WHEELS, NO_CODE, RUNS, describe_code
from builder.applier.outcomes import OpResult
from builder.applier.records import parse_record
from builder.applier.sources import Unstaged
from builder.applier.states import (
    AMBIGUOUS,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
    POST,
    PRE,
    SKIP,
    UPSTREAM,
)
from builder.applier.trees import DirTree, Distribution, OverlayTree, Tree
from builder.applier.versions import normalize
from builder.applier.wheelops import WheelOps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from builder.applier.opkinds import Compile, Kernels


class CompileOps(WheelOps):
    """The ops of a layer that change compiled code."""

    def op_compile(self, op: Compile) -> OpResult:
        if not op.change or not op.code:  # of a pull request
            return self._compiled(op, op.reason, Compiled())
        code = self._code(op.code)
        compiled = Compiled(code)
        said = describe_code(code, op.code.name)
        if code.how == RUNS and code.module.startswith(EXTENSION_WHEELS):
            return OpResult(POST, reason=said, compiled=compiled)
        if code.how == RUNS and op.change.guard in (code.guard or ""):
            since = f"vLLM {op.change.applied_upstream}"
            return OpResult(UPSTREAM, reason=said, since=since, compiled=compiled)
        if code.how in (RUNS, NO_CODE):
            return OpResult(NOT_APPLICABLE, reason=said, compiled=compiled)
        return self._compiled(op, said, compiled)

    def _compiled(self, op: Compile, said: str, compiled: Compiled) -> OpResult:
        """A change to sources, compiled together with earlier ones, if allowed."""
        if not op.source:  # nothing that a stage takes
            return OpResult(NEEDS_REBUILD, reason=said)
        ops = self.together.with_op(op)
        stage = self.sources.stage(ops, self.packages, self.target, self._extension)
        if stage is None:
            return OpResult(NEEDS_REBUILD, reason=said, compiled=compiled)
        compiled = replace(compiled, sources=stage.sources)
        if isinstance(stage, Unstaged):
            return _unstaged(stage, compiled)
        if not self.together.add(self.layer.name, op):
            compiled = replace(compiled, carrier=self.together.carrier)
            return OpResult(PRE, reason=said, compiled=compiled)
        if stage.refusal:
            return _unstaged(stage.refusal, replace(compiled, sources=stage.refusal.sources))
        standing, stranger = self._installed_wheels(stage.request.operators)
        if stranger:
            return OpResult(AMBIGUOUS, reason=stranger, compiled=compiled)
        compiled = replace(compiled, stage=stage.request, wheel=stage.wheel)
        if stage.wheel is None:
            return OpResult(PRE, reason=said, compiled=compiled)
        result = self._installed(stage.wheel)
        self.together.made |= {path.partition("/")[0] for path in result.changes}
        for dist in standing:
            if dist.name != normalize(stage.wheel.distribution):
                result.changes = {**self._without(dist), **result.changes}
        result.reason, result.inputs, result.compiled = said, [], compiled
        return result

    def _installed_wheels(self, operators: Iterable[str]) -> tuple[list[Distribution], str]:
        """Extension wheels in the tree with any of these operators: those of layers that share
        the stage, and a message about others."""
        ours: list[Distribution] = []
        layers = {*self.together.layers(), self.layer.name}
        for name, dist in self.view.distributions().items():
            package = name.replace("-", "_")
            about = self.view.read(f"{package}/companion.json")
            if not package.startswith(EXTENSION_WHEELS) or about is None:
                continue
            both = {row["name"] for row in json.loads(about)["operators"]} & set(operators)
            if not both:
                continue
            owners = {r.layer for r in self.receipts if f"{dist.info_dir}/RECORD" in r.files}
            if not owners & layers:
                return [], (
                    f"{package} in the base registers {', '.join(sorted(both))} already, and of "
                    "two extension wheels one overrides the other: remove it, or start from a base "
                    "without it"
                )
            ours.append(dist)
        return ours, ""

    def _extension(self, name: str) -> str:
        """The sha256 of an extension module, such as ``vllm/_C``, or ''."""
        found = next(iter(self._modules([f"{name}.*"])), "")
        return self._module_digest(found) if found else ""

    def _code(self, wanted: Kernels) -> ModuleCode:
        """The first module that has some kernels, and how SM121 runs them."""
        known = {pin.sha256: pin for pin in self.layer.pins.code}
        seen: list[ModuleCode] = []
        for path in self._modules(wanted.modules):
            if path.partition("/")[0] in self.together.made:
                continue
            digest = self._module_digest(path)
            code = known.get(digest) or self.sources.code(self.view, path, wanted, digest)
            seen.append(ModuleCode(path, digest, code.how, code.arch or None, code.guard or None))
            if code.how not in (ABSENT, NO_CODE):
                return seen[-1]
        return next((one for one in seen if one.how == ABSENT), ModuleCode("", "", NO_CODE))

    def _module_digest(self, path: str) -> str:
        """The sha256 of a large file: computed for a directory, else from RECORD.

        In an image, hashing it would mean reading a layer of gigabytes; level ``static`` holds
        every file of the built image against its RECORD.
        """
        tree: Tree = self.view
        while isinstance(tree, OverlayTree):
            tree = tree.base
        if not isinstance(tree, DirTree):
            dist = self.view.distributions()[normalize(self.layer.package)]
            rows = parse_record(self.view.read(f"{dist.info_dir}/RECORD") or b"")
            recorded = next((row.sha256 for row in rows if row.path == path), None)
            if recorded:
                return recorded
        return self.view.digest(path) or ""

    def _modules(self, patterns: Iterable[str]) -> Iterator[str]:
        for pattern in patterns:
            above, _, name = pattern.rpartition("/")
            for folder in fnmatch.filter(self.view.children(""), above):
                names = fnmatch.filter(self.view.children(folder), name)
                yield from (f"{folder}/{found}" for found in names if found.endswith(".so"))


def _unstaged(why: Unstaged, compiled: Compiled) -> OpResult:
    found = SKIP if why.state in (UPSTREAM, NOT_APPLICABLE) else why.state
    return OpResult(found, reason=why.reason, since=why.since, notes=why.notes, compiled=compiled)
