"""The flags that replaced variables which a release does not read."""

from __future__ import annotations

import tomllib
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from builder.common.document import Part, Text
from builder.common.paths import package_file

if TYPE_CHECKING:
    from builder.serving.interface import ServeInterface


class Replaced(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variable that releases no longer read, or never did, and the flag with the same effect."""

    name: Text
    flag: Text
    #: values that the flag spells differently; an empty one needs no flag
    values: dict[str, str] = msgspec.field(default_factory=dict)
    source: Text

    def value(self, old: str) -> str:
        """The flag's value for a value of the variable; empty if no flag is needed."""
        return self.values.get(old, old)

    def flag_refusal(self, interface: ServeInterface, old: str) -> str:
        """Why a release would refuse the flag too; empty if it accepts it, or needs none."""
        value = self.value(old)
        return interface.refusal(self.flag, value) if value else ""


@cache
def replaced() -> dict[str, Replaced]:
    """All of them, by the variable's name."""
    raw = tomllib.loads(package_file("data", "serving-replacements.toml").read_text("utf-8"))
    return {one.name: one for one in msgspec.convert(raw["variable"], list[Replaced])}
