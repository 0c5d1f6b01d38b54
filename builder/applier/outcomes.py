"""Results of judging: that of one op, and that of a layer."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.states import NEEDED

if TYPE_CHECKING:
    from builder.applier.trees import Changes

Layer = Mapping[str, Any]


def layer_digest(layer: Layer) -> str:
    """The identity of a rendered layer."""
    return sha256_hex(canonical_json(layer))


@dataclass(frozen=True)
class Target:
    """What pins are chosen for: an OCI platform and a CPython tag such as ``cp312``."""

    platform: str
    python: str

    @classmethod
    def here(cls) -> Target:
        """This interpreter on this machine."""
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "unknown")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        return cls(f"linux/{machine}", tag)


@dataclass
class OpResult:
    """What one operation finds: ``pre``, ``post``, ``drift``, ``ambiguous``, or ``skip``."""

    found: str
    changes: Changes = field(default_factory=dict)
    reason: str = ""
    env: dict[str, str] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    since: str | None = None
    notes: tuple[str, ...] = ()
    #: what was found of compiled code, and the stage that compiles a change to it
    compiled: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """A layer judged on a tree: its state, why, and exactly what would change."""

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
    inputs: list[dict[str, Any]] = field(default_factory=list)
    #: file -> kinds of op that touched it, for the plan and the receipt
    ops: dict[str, list[str]] = field(default_factory=dict)
    #: what was found of compiled code, and the stage that compiles a change to it
    compiled: dict[str, Any] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Whether a change has yet to be compiled, so that its files are not known."""
        return self.state == NEEDED and "stage" in self.compiled and not self.compiled["wheel"]
