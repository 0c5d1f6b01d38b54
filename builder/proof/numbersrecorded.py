"""What level ``numbers`` found in releases, recorded: the reports of ``verify --json``."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def records(folder: Path, pattern: str = "vllm-*.json") -> list[dict[str, Any]]:
    """The evidence, a record for each release of vLLM or of the package.

    Raises:
        ValueError: a file is no such record.
    """
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            record = json.loads(path.read_text("utf-8"))
            versions(record)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is not what verify --json prints: {error}") from None
        found.append(record)
    if not found:
        raise ValueError(f"{folder} has no {pattern}")
    return found


def versions(record: Mapping[str, Any]) -> tuple[str, str]:
    """FlashInfer and CuTe DSL."""
    where = str(record["checks"][0]["where"])
    found = re.match(r"FlashInfer (\S+) \+ CuTe DSL (\S+) of", where)
    if found is None:
        raise ValueError(f"its first check names no FlashInfer and CuTe DSL: {where!r}")
    return found[1], found[2]


def cell(check: Mapping[str, Any]) -> str:
    """One result in a few words; nothing where a release has no such kernel."""
    if check.get("moot"):
        return ""
    if check["status"] != "fail":
        return {"pass": "right", "not-run": "not run"}[check["status"]]
    wrong = "wrong values" if check["seen"].startswith("wrong values") else ""
    race = "race" if "race, " in check["seen"] else ""
    return " and ".join(part for part in (wrong, race) if part) or "does not run"
