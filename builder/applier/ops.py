"""Judges each op of a layer: its finding and its changes."""

from __future__ import annotations

import base64
import difflib
from typing import TYPE_CHECKING, Any

from builder.applier.compileops import CompileOps
from builder.applier.diff import parse_diff
from builder.applier.edits import graft_text, replace_text, run_hook
from builder.applier.environment import read_envs
from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.files import create_file, edit_file, judge_diff, undone
from builder.applier.outcomes import OpResult
from builder.applier.states import DRIFT, POST, PRE
from builder.applier.targets import checked_path, collision
from builder.applier.text import NOT_PYTHON
from builder.applier.trees import OverlayTree
from builder.applier.versions import normalize

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.applier.layers import DonorPin
    from builder.applier.opkinds import Copy, Diff, Env, Graft, Hook, Op, Pull, Replace


class Ops(CompileOps):
    """The ops of one variant, over a view of the tree."""

    def judged(self, op: Op) -> OpResult:
        """Judge one op: its finding and its changes.

        Raises:
            ApplyError: it would write a path that is none of a file below site-packages.
        """
        method: Callable[[Any], OpResult] = getattr(self, f"op_{op.kind}")
        result = method(op)
        for path in result.changes:
            checked_path(path, f"layer {self.layer.name}: op {op.kind}")
        written = [path for path, content in result.changes.items() if content is not None]
        after = OverlayTree(self.view)
        after.update(result.changes)
        problem = collision(written, after)
        return OpResult(DRIFT, reason=problem) if problem else result

    def op_replace(self, op: Replace) -> OpResult:
        return edit_file(
            self.view,
            op.file,
            lambda text: replace_text(text, op.old, op.new, op.count),
        )

    def op_diff(self, op: Diff) -> OpResult:
        files = parse_diff(op.diff)
        result = judge_diff(files, self.view)
        if result.found in (PRE, POST) or not self.later:
            return result
        # later changes of the same stack may have edited this one's result
        below = judge_diff(files, undone(self.view, self.later))
        reason = "it is already applied, below later changes of its series"
        return OpResult(POST, reason=reason) if below.found == POST else result

    def op_graft(self, op: Graft) -> OpResult:
        pin = self._donor_pin(op)
        donor = self.sources.donor(pin)
        if op.whole:
            result = create_file(self.view, op.file, donor)
        else:
            try:
                text = donor.decode("utf-8")
            except UnicodeDecodeError:
                return OpResult(DRIFT, reason=f"{op.donor}: {op.donor_file} is not UTF-8 text")
            result = edit_file(
                self.view,
                op.file,
                lambda target: graft_text(target, text, op.names, op.after, op.replace),
            )
        result.inputs = [pin]
        return result

    def op_copy(self, op: Copy) -> OpResult:
        try:
            data = base64.b64decode(op.data, validate=True)
        except ValueError:
            raise ApplyError(
                f"layer {self.layer.name}: the data of {op.to} is not base64", EXIT_USAGE
            ) from None
        return create_file(self.view, op.to, data)

    def op_hook(self, op: Hook) -> OpResult:
        return edit_file(self.view, op.file, lambda text: run_hook(op.source, op.function, text))

    def op_env(self, op: Env) -> OpResult:
        name, value = op.name, op.value
        reader = op.reader
        data = self.view.read(reader)
        if data is None:
            return OpResult(DRIFT, reason=f"{reader}, which should read {name}, does not exist")
        text = data.decode("utf-8", "replace")
        if reader == "vllm/envs.py":
            try:
                envs = read_envs(text)
            except NOT_PYTHON as error:
                return OpResult(DRIFT, reason=f"{reader} is not Python: {error}")
            if name not in envs.known:
                near = difflib.get_close_matches(name, list(envs.known), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                return OpResult(
                    DRIFT,
                    reason=f"vllm {self.packages.get('vllm')} does not read {name} "
                    f"(not in {reader}){hint}",
                )
            choices = envs.known[name]
            if choices is not None and value not in choices:
                return OpResult(
                    DRIFT,
                    reason=f"{name}={value} is not a choice of vllm "
                    f"{self.packages.get('vllm')}: {', '.join(choices)}",
                )
        elif name not in text:
            return OpResult(DRIFT, reason=f"{reader} does not read {name}")
        found = POST if self.base_env.get(name) == value else PRE
        return OpResult(found, env={name: value})

    def op_pull(self, op: Pull) -> OpResult:
        raise ApplyError(
            f"layer {self.layer.name}: {op.pull} was not fetched before it was judged",
            EXIT_USAGE,
            f"spark-build plan --layers {self.layer.name}",
        )

    def _donor_pin(self, op: Graft) -> DonorPin:
        distribution, _, version = op.donor.partition("==")
        member = op.donor_file
        for pin in self.layer.pins.donor:
            same = normalize(pin.distribution) == normalize(distribution)
            if same and pin.version == version and pin.member == member:
                return pin
        raise ApplyError(
            f"layer {self.layer.name}: no pin for {member} of {op.donor}",
            EXIT_USAGE,
            f"spark-build layers pin {self.layer.name}",
        )
