"""What a pull request was when it was pinned: enough to use it for ever without asking again."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from builder.errors import KINDS, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A pull request (``number`` 0: a commit), fixed by its commits and the sha256 of its diff.

    The diff is that from ``base`` to ``commit`` in normal form (:mod:`builder.forge.normalize`);
    ``size`` is its bytes.  ``release`` is the first release of the package with the change in it.
    """

    request: str
    forge: str
    repository: str
    number: int = 0
    base: str
    commit: str
    date: str
    sha256: str
    size: int
    title: str = ""
    state: str = ""
    url: str = ""
    merge_commit: str = ""
    merged_at: str = ""
    superseded_by: str = ""
    release: str = ""

    def as_json(self) -> dict[str, Any]:
        """The pin as it is written down, without what is empty."""
        return {key: value for key, value in sorted(asdict(self).items()) if value}

    @property
    def short(self) -> str:
        """The commit as people quote it."""
        return self.commit[:12]


def read_pin(value: object, where: str) -> Pin:
    """A pin out of a lock or ``pins.toml``.

    Raises:
        UsageError: it lacks something, or holds what is not of the right form.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{where}: a pin should be a table")
    kinds = {field.name: int if field.name in ("number", "size") else str for field in fields(Pin)}
    for key, item in value.items():
        if key not in kinds:
            raise UsageError(f"{where}: unknown key {key!r}")
        if type(item) is not kinds[key]:
            raise UsageError(f"{where}: {key!r} should be {KINDS[kinds[key]]}")
    missing = [name for name in _required() if name not in value]
    if missing:
        raise UsageError(f"{where}: key {missing[0]!r} is missing")
    pin = Pin(**value)
    forms = {"base": _COMMIT, "commit": _COMMIT, "sha256": _SHA256, "date": _DATE}
    for key, form in forms.items():
        if not form.fullmatch(getattr(pin, key)):
            raise UsageError(f"{where}: {key} {getattr(pin, key)!r} is not of the right form")
    return pin


def _required() -> tuple[str, ...]:
    return ("request", "forge", "repository", "base", "commit", "date", "sha256", "size")


def read_pins(rows: Mapping[str, object], where: str) -> dict[str, Pin]:
    """Pins by request."""
    return {name: read_pin(row, f"{where}: {name}") for name, row in rows.items()}
