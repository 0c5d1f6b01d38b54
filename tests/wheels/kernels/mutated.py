"""Mutants of a kernel that level ``numbers`` launched, and what notices them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.proof.kernels import launch_request
from builder.proof.numbers import judged
from builder.ptx.launchfile import read_launch
from builder.ptx.runs import program_of
from builder.ptx.source import Instruction, Name
from tests.mutants import Mutant, caught
from tests.wheels.support import replies_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest

    from builder.proof.kernels import Launched
    from builder.proof.target import VerifyTarget
    from builder.ptx.findings import Ran
    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.source import Kernel

Change = Callable[[Instruction], Instruction]


def without_effect(one: Instruction) -> Instruction:
    """An instruction without any effect, in the place of one."""
    register = Name("%r1")
    return replace(one, opcode="mov", modifiers=("b32",), operands=(register, register))


@dataclass(frozen=True)
class LaunchedAlone:
    """The one launch of a right kernel, to make mutants of."""

    ran: Ran
    launch: LaunchFile
    kernel: Kernel

    @classmethod
    def of(
        cls, target: VerifyTarget, one: Launched, kept: Path, patch: pytest.MonkeyPatch
    ) -> LaunchedAlone:
        """Launch it on a target, and keep the launch."""
        patch.setenv("SPARK_BUILD_KEEP_LAUNCHES", str(kept))
        (reply,) = replies_of(target, launch_request(target.plan.env, "sm_121a", [one])).replies
        (ran,) = reply.ran
        (path,) = kept.rglob("launch.json")
        launch = read_launch(path)
        return cls(ran, launch, program_of(launch, path).kernel)

    def check_mutants(self, mutants: Mapping[str, tuple[Change, str]]) -> None:
        """By the name of the instructions that are changed: the change, and what notices it."""
        known = {race.key for run in self.ran.runs for race in judged(run)}
        for name, (change, noticed) in mutants.items():
            code = tuple(change(i) if i.name.startswith(name) else i for i in self.kernel.code)
            assert code != self.kernel.code, name
            mutant = Mutant(name, 0, name, replace(self.kernel, code=code))
            assert noticed in caught(mutant, [self.launch], known), name
