"""Reads the pin of a pull request."""

from __future__ import annotations

from builder.documents.pulls import Pin
from builder.errors import UsageError
from builder.util.documents import read


def read_pin(value: object, where: str) -> Pin:
    """Read a pin from a lock or ``pins.toml``.

    Raises:
        UsageError: a field is missing or malformed.
    """
    try:
        return read(value, Pin)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
