"""A draft of a recipe: accepted settings, and those left out, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.serving.documents import LeftOut, PluginFile, Setting
from builder.serving.interface import canonical
from builder.serving.replaced import replaced

if TYPE_CHECKING:
    from builder.serving.reciperequest import RecipeRequest


@dataclass
class Draft:
    """A draft of a recipe.  Later settings override earlier ones."""

    request: RecipeRequest
    flags: dict[str, Setting] = field(default_factory=dict)
    env: dict[str, Setting] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plugins: list[PluginFile] = field(default_factory=list)

    def flag(self, name: str, value: str | None, origin: str) -> None:
        """Add a flag, if the release knows it."""
        interface = self.request.served.interface
        why = interface.refusal(name, value)
        known = interface.flag(canonical(name))
        if why:
            self.leave_out(name, value, origin, why)
        else:
            self.flags[known.names[0] if known else name] = Setting(
                name=name, value=value, origin=origin
            )

    def variable(self, name: str, value: str, origin: str) -> None:
        """Add a variable, if the release reads it; else the flag that replaced it."""
        why = self.request.served.interface.variable_refusal(name, value)
        if not why:
            self.env[name] = Setting(name=name, value=value, origin=origin)
            return
        other = replaced().get(name)
        if other is not None and (flag_value := other.value(value)):
            why = f"{why}; {other.flag} {flag_value} replaces it"
            self.flag(other.flag, flag_value, f"{origin}: {name}={value}")
        self.leave_out(name, value, origin, why)

    def leave_out(self, name: str, value: str | None, origin: str, reason: str) -> None:
        """Record a setting that is not in the recipe."""
        self.left_out.append(LeftOut(name=name, value=value, origin=origin, reason=reason))
