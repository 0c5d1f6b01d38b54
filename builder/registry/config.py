"""Image configurations: parsed from untrusted bytes, with the type of every field checked.

The types are those of the OCI image specification ("Image Configuration"); Docker's agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from builder.errors import RemoteError
from builder.registry.model import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
#: RFC 3339, section 5.6, as runtimes read it.
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def _is_text(value: object) -> bool:
    """A string without NUL, which no process environment can hold."""
    return isinstance(value, str) and "\0" not in value


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_labels(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_time(value: object) -> bool:
    return isinstance(value, str) and (not value or _TIME.fullmatch(value) is not None)


def _is_digests(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) and _DIGEST.fullmatch(item) for item in value
    )


#: A check for a value, and its description in messages.
_Kind = tuple["Callable[[object], bool]", str]
_TEXT: _Kind = (_is_text, "a text")
_TEXTS: _Kind = (_is_texts, "a list of texts")
_TIMES: _Kind = (_is_time, "a time as RFC 3339 writes it")
_OBJECT: _Kind = (lambda value: isinstance(value, dict), "an object")
_LIST: _Kind = (lambda value: isinstance(value, list), "a list")

_TOP: dict[str, _Kind] = {
    "architecture": _TEXT,
    "os": _TEXT,
    "variant": _TEXT,
    "created": _TIMES,
    "config": _OBJECT,
    "rootfs": _OBJECT,
    "history": _LIST,
}
_SETTINGS: dict[str, _Kind] = {
    "Env": _TEXTS,
    "Entrypoint": _TEXTS,
    "Cmd": _TEXTS,
    "Labels": (_is_labels, "an object of texts"),
    "User": _TEXT,
    "WorkingDir": _TEXT,
    "ExposedPorts": _OBJECT,
    "Volumes": _OBJECT,
}
_ROOTFS: dict[str, _Kind] = {"diff_ids": (_is_digests, "a list of sha256 digests")}
_STEP: dict[str, _Kind] = {
    "created": _TIMES,
    "created_by": _TEXT,
    "comment": _TEXT,
    "empty_layer": (lambda value: isinstance(value, bool), "true or false"),
}


@dataclass(frozen=True, kw_only=True)
class HistoryStep:
    """One entry of an image's ``history``."""

    created_by: str
    empty_layer: bool


@dataclass(frozen=True)
class ImageConfig:
    """An image's configuration.

    ``document`` is the whole of it, for whoever writes a changed copy: fields that spark-build
    does not know must stay as they are.
    """

    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def platform(self) -> dict[str, str]:
        """``os``, ``architecture`` and ``variant``, as an index lists them; only those present."""
        names = ("architecture", "os", "variant")
        return {name: self.document[name] for name in names if self.document.get(name)}

    @property
    def architecture(self) -> str:
        """``arm64``."""
        return self.platform.get("architecture", "")

    @property
    def created(self) -> str:
        """A time in RFC 3339 format, or ``""``."""
        return self.document.get("created") or ""

    @property
    def settings(self) -> Mapping[str, Any]:
        """``Env``, ``User`` and so on, as a container runtime takes them."""
        return self.document.get("config") or {}

    @property
    def env_lines(self) -> tuple[str, ...]:
        """Environment variables as ``NAME=value``, in their order."""
        return tuple(self.settings.get("Env") or ())

    @property
    def env(self) -> dict[str, str]:
        """Environment variables by name."""
        return dict(line.split("=", 1) for line in self.env_lines if "=" in line)

    @property
    def labels(self) -> dict[str, str]:
        """Labels by name."""
        return dict(self.settings.get("Labels") or {})

    @property
    def user(self) -> str:
        """The user that a container's process runs as, or ``""``."""
        return self.settings.get("User") or ""

    @property
    def working_directory(self) -> str:
        """Where a container's process starts."""
        return self.settings.get("WorkingDir") or "/"

    @property
    def diff_ids(self) -> tuple[str, ...] | None:
        """Digests of the uncompressed layers; None where the configuration has no such list."""
        ids = (self.document.get("rootfs") or {}).get("diff_ids")
        return None if ids is None else tuple(ids)

    @property
    def history(self) -> tuple[HistoryStep, ...]:
        """What made the layers, bottom first."""
        return tuple(
            HistoryStep(
                created_by=step.get("created_by") or "", empty_layer=bool(step.get("empty_layer"))
            )
            for step in self.document.get("history") or ()
            if step is not None
        )


def parse_config(data: bytes, where: str) -> ImageConfig:
    """An image's configuration from untrusted bytes; a field may be missing or null.

    Raises:
        RemoteError: it is not a JSON object, or a field has the wrong type; names the field.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RemoteError(f"{where}: its configuration is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RemoteError(f"{where}: its configuration is not a JSON object")
    _check(value, _TOP, "", where)
    _check(value.get("config") or {}, _SETTINGS, "config.", where)
    _check(value.get("rootfs") or {}, _ROOTFS, "rootfs.", where)
    for number, step in enumerate(value.get("history") or []):
        name = f"history[{number}]"
        _one(name, step, _OBJECT, where)
        _check(step or {}, _STEP, f"{name}.", where)
    return ImageConfig(value)


def _check(value: Mapping[str, Any], kinds: Mapping[str, _Kind], path: str, where: str) -> None:
    for key, kind in kinds.items():
        _one(f"{path}{key}", value.get(key), kind, where)


def _one(name: str, value: object, kind: _Kind, where: str) -> None:
    fits, wanted = kind
    if value is not None and not fits(value):
        shown = repr(value)
        raise RemoteError(
            f"{where}: {name} in its configuration is not {wanted}, but "
            f"{shown if len(shown) <= 100 else f'{shown[:100]}...'}",
            hint="use another image; this one is malformed, and some runtimes cannot start it",
        )
