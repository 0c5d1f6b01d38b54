"""The seven states of a layer, and the results of judging an op and a layer."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.applier.layers import InputPin
    from builder.applier.machinecode import Compiled
    from builder.applier.trees import Changes

#: The seven layer states; every consumer handles each of them.
NEEDED = "needed"
APPLIED = "applied"
UPSTREAM = "upstream"
NOT_APPLICABLE = "not-applicable"
NEEDS_REBUILD = "needs-rebuild"
DRIFT = "drift"
AMBIGUOUS = "ambiguous"
STATES = (NEEDED, APPLIED, UPSTREAM, NOT_APPLICABLE, NEEDS_REBUILD, DRIFT, AMBIGUOUS)
PRE, POST, SKIP = "pre", "post", "skip"


# ------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Target:
    """The target of pins: an OCI platform and a CPython tag such as ``cp312``."""

    platform: str
    python: str

    @classmethod
    def here(cls) -> Target:
        """The target of this interpreter on this machine."""
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "unknown")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        return cls(f"linux/{machine}", tag)


@dataclass
class OpResult:
    """One op on a tree; ``form`` is ``pre``, ``post``, ``drift``, ``ambiguous``, or ``skip``."""

    form: str
    changes: Changes = field(default_factory=dict)
    reason: str = ""
    env: dict[str, str] = field(default_factory=dict)
    inputs: list[InputPin] = field(default_factory=list)
    since: str | None = None
    notes: tuple[str, ...] = ()
    compiled: Compiled | None = None


@dataclass
class Outcome:
    """A layer judged on a tree: its state, the reason, and the exact changes."""

    layer: str
    state: str
    reason: str
    variant: str | None = None
    since: str | None = None
    changes: Changes = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    serve_flags: list[str] = field(default_factory=list)
    moe_serve_flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: list[InputPin] = field(default_factory=list)
    #: file -> kinds of op that touched it, for the plan and the receipt
    ops: dict[str, list[str]] = field(default_factory=dict)
    compiled: Compiled | None = None

    @property
    def pending(self) -> bool:
        """Whether a change is not yet compiled, so that its files are unknown."""
        code = self.compiled
        waiting = code is not None and code.stage is not None and code.wheel is None
        return self.state == NEEDED and waiting
