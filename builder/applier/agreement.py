"""Checks that selected layers agree on the settings they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_USAGE, ApplyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def flag_values(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags of ``vllm serve``, each with its value."""
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            after = words[place + 1] if place + 1 < len(words) else "--"
            yield name, value if equals else None if after.startswith("--") else after


class Agreement:
    """Variables and flags set by layers so far."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, str | None]] = {}

    def add(
        self, layer: str, env: Mapping[str, str], flags: Sequence[str], where: str = ""
    ) -> None:
        """Add a layer's settings; ``where`` names the base in messages.

        Raises:
            ApplyError: an earlier layer sets a different value.
        """
        for name, value in [*env.items(), *flag_values(flags)]:
            other, before = self._set.setdefault(name, (layer, value))
            if before != value:
                raise ApplyError(
                    f"layers {other} and {layer} contradict each other{where}: {other} sets "
                    f"{_shown(name, before)}, {layer} sets {_shown(name, value)}",
                    EXIT_USAGE,
                    "name only one of them, or a profile with only one of them, with --layers",
                )


def _shown(name: str, value: str | None) -> str:
    if not name.startswith("--"):
        return f"{name}={value}"
    return name if value is None else f"{name} {value}"
