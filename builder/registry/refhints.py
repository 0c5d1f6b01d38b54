"""Suggestions for a folder or a release given as an image reference."""

from __future__ import annotations

import re
from pathlib import Path

from builder.errors import UsageError
from builder.util.hints import instead

_SCHEMES = ("docker://", "oci:", "pypi:", "dir:")


def intended_reference(ref: str) -> str:
    """What users probably mean by an invalid image reference: ``pypi:``, ``oci:``..."""
    if re.fullmatch(r"v?\d+\.\d+(\.\w+)*(\+\w+)?", ref):
        return f"pypi:vllm=={ref.removeprefix('v')}"
    if re.match(r"[A-Za-z][\w.-]*(\[[\w,-]+\])?==\d", ref):
        return f"pypi:{ref}"
    folder = Path(ref)
    if ref.startswith("~") or not folder.is_dir():
        return ""
    if (folder / "index.json").is_file() and (folder / "oci-layout").is_file():
        return f"oci:{ref}"
    places = (folder, *folder.glob("lib/python3*/site-packages"))
    return f"dir:{ref}" if any(any(place.glob("vllm-*.dist-info")) for place in places) else ""


def refuse_wrong_kind(ref: str) -> None:
    """Refuse an image reference that is really a release or a folder.

    Raises:
        UsageError: it is one; the hint says what was probably meant.
    """
    probably = intended_reference(ref) if not ref.startswith(_SCHEMES) else ""
    if not probably:
        return
    what = "a release" if probably.startswith("pypi:") else "a folder here"
    raise UsageError(
        f"{ref!r} is read as an image name, but it is {what}; did you mean {probably!r}?",
        hint=instead(ref, probably),
    )
