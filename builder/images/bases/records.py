"""Checks whether the RECORD of an installed distribution is complete.

RECORD is the only list of a package's files: with a damaged one a package would
look empty, and a base as if there were nothing to patch.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from builder.applier.records import parse_record
from builder.applier.trees import distribution_of
from builder.errors import UsageError

if TYPE_CHECKING:
    from builder.applier.trees import Tree

_SHA256 = 64
_REINSTALL = "use a base where pip or uv installed vllm from a wheel"


def recorded(data: bytes | None, where: str) -> list[str]:
    """The paths in the RECORD of a distribution whose ``.dist-info`` is at ``where``.

    Raises:
        UsageError: it is damaged; or it is vLLM's, and is missing or incomplete.
    """
    info = where.rpartition("/")[2]
    dist = distribution_of(info)
    ours = dist is not None and dist.name == "vllm"
    if data is None:
        if ours:
            raise UsageError(f"{where} has no RECORD, so its files are unknown", hint=_REINSTALL)
        return []
    try:
        rows = parse_record(data)
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{where}/RECORD is damaged: {error}") from None
    for number, row in enumerate(rows, 1):
        if not row.path or (row.sha256 is not None and len(row.sha256) != _SHA256):
            raise UsageError(f"{where}/RECORD is damaged: row {number} ({row.path[:80]!r})")
    paths = [row.path for row in rows]
    if ours and not (f"{info}/RECORD" in paths and any(p.startswith("vllm/") for p in paths)):
        raise UsageError(
            f"{where}/RECORD is damaged, or not that of a wheel: its {len(rows)} rows do not name "
            "both files below vllm/ and RECORD itself",
            hint=_REINSTALL,
        )
    return paths


def check_vllm(tree: Tree, where: str) -> None:
    """Refuse site-packages whose vLLM has an incomplete RECORD.

    Raises:
        UsageError: that.
    """
    dist = tree.distributions().get("vllm")
    if dist is None:
        raise UsageError(
            f"{where}: the RECORD of vllm is missing or damaged: it does not name its own METADATA",
            hint=_REINSTALL,
        )
    recorded(tree.read(f"{dist.info_dir}/RECORD"), f"{where}/{dist.info_dir}")
