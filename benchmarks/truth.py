"""What servers on GB10s logged, beside preflight: ``python -m benchmarks.truth CASES``.

CASES is a JSON file with a list ``cases``, each with ``id``, ``release``, ``flags``, the figures
that a server ``logged``, and ``config``: a folder below ``configs`` beside the file, or the name of
a model of ours after ``product:``.  A nightly build is asked as the release in ``asked_as``.
The table has one row for each figure that both have.  A cache is sized twice: for the memory that
preflight expects to be left, and for what the server logged, where only the release's arithmetic
is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.errors import SparkBuildError
from builder.pipeline.options import PlanOptions
from builder.serving.preflight import PreflightRequest, preflight
from builder.serving.released import release_base

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.preflight import Preflight

GIB = 2**30
_PINNED = "--kv-cache-memory-bytes"
_RELEASE = re.compile(r"\d+\.\d+\.\d+")
_PADDING = re.compile(r"Add (\d+) padding layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A figure, or a choice, that a server logged."""

    case: str
    what: str
    logged: object
    predicted: object

    @property
    def error(self) -> float | None:
        """How much the prediction differs, as a share; None where it is no number."""
        if not isinstance(self.logged, (int, float)) or not isinstance(
            self.predicted, (int, float)
        ):
            return None
        return self.predicted / self.logged - 1 if self.logged else None


def request_of(case: dict[str, Any], configs: Path, *more: str) -> PreflightRequest | None:
    """The question for a case; None where its configuration or its release is not to be had."""
    config = str(case.get("config") or "")
    release = str(case.get("asked_as") or case["release"])
    if not _RELEASE.fullmatch(release):
        release = str((case.get("predicted") or {}).get("release") or "")
    if not config or not release:
        return None
    name = config.removeprefix("product:").partition(";")[0].partition("(")[0].strip()
    model = name if config.startswith("product") else str(configs / name)
    command = shlex.split((case.get("predicted") or {}).get("command", ""))
    own = [word for word in command[5:] if word != "--json"] or list(case["flags"])
    variables = list(case.get("env") or ())
    while "--env" in own:
        at = own.index("--env")
        variables.append(own[at + 1])
        del own[at : at + 2]
    return PreflightRequest(
        model=model, flags=(*own, *more), cures=False, variables=tuple(variables),
        plan=PlanOptions(base=release_base(release)),
    )  # fmt: skip


def rows_of(case: dict[str, Any], configs: Path) -> Iterator[Row]:
    """The rows of a case."""
    request = request_of(case, configs)
    if request is None:
        return
    logged = case["logged"]
    answer = preflight(request)
    yield from _plain(case["id"], logged, answer)
    left = None if _PINNED in case["flags"] else logged.get("available_kv_gib")
    if not isinstance(left, (int, float)) or answer.memory is None:
        return
    pinned = preflight(
        request_of(case, configs, _PINNED, str(int(left * GIB)))  # type: ignore[arg-type]
    )
    memory = pinned.memory
    if memory is None:
        return
    name = f"{case['id']}, {left} GiB given"
    if "concurrency" in logged:
        yield Row(
            case=name, what="concurrency", logged=logged["concurrency"],
            predicted=round(memory.concurrency, 2),
        )  # fmt: skip
        yield Row(
            case=name, what="one request, GiB", logged=round(left / logged["concurrency"], 3),
            predicted=round(memory.request_bytes / GIB, 3),
        )  # fmt: skip


def _plain(case: str, logged: dict[str, Any], answer: Preflight) -> Iterator[Row]:
    """What needs nothing of the log."""
    if "refused" in logged:
        said = answer.refusal.message.strip().replace("\n", " ")[:90] if answer.refusal else ""
        yield Row(case=case, what="refused", logged=logged["refused"][:90], predicted=said or "no")
    memory = answer.memory
    if memory is None:
        if "refused" not in logged:
            yield Row(case=case, what="starts", logged="yes", predicted=answer.starts)
        return
    weights = logged.get("weights_gib") or logged.get("weights_gib_rank0")
    padding = [int(found[1]) for line in answer.lines if (found := _PADDING.match(line))]
    known: dict[str, tuple[object, object]] = {
        "weights, GiB": (weights, round(memory.weight_bytes / GIB, 2)),
        "KV cache, GiB": (logged.get("available_kv_gib"), round(memory.cache_bytes / GIB, 2)),
        "block, tokens": (logged.get("block"), memory.block_tokens),
        "padding layers": (logged.get("padding_layers"), padding),
        "max_num_seqs": (logged.get("max_num_seqs"), answer.settings.get("max_num_seqs")),
        "max_num_batched_tokens": (
            logged.get("max_num_batched_tokens"), answer.settings.get("max_num_batched_tokens"),
        ),
    }  # fmt: skip
    for what, (one, other) in known.items():
        if one is not None:
            yield Row(case=case, what=what, logged=one, predicted=other)


def table(rows: list[Row]) -> Iterator[str]:
    """The rows in Markdown, and the errors of each figure."""
    yield "| case | figure | logged | preflight | |\n|---|---|---|---|---|"
    for row in rows:
        error = row.error
        words = "equal" if row.logged == row.predicted else ""
        words = f"{error:+.1%}" if error is not None and not words else words
        yield f"| {row.case} | {row.what} | {row.logged} | {row.predicted} | {words} |"
    for what in sorted({row.what for row in rows}):
        errors = [abs(r.error) for r in rows if r.what == what and r.error is not None]
        if errors:
            yield (
                f"\n{what}: {len(errors)} cases, {statistics.median(errors):.1%} in the median, "
                f"{max(errors):.1%} at most"
            )


def main() -> int:
    """Ask every case; exit 1 if one could not be asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    given = parser.parse_args()
    cases = json.loads(given.cases.read_text("utf-8"))["cases"]
    rows: list[Row] = []
    failed = 0
    for case in cases:
        try:
            found = list(rows_of(case, given.cases.parent / "configs"))
        except SparkBuildError as error:
            print(f"{case['id']}: {error}", file=sys.stderr)
            failed += 1
            continue
        if not found:
            print(f"{case['id']}: not asked (no configuration)", file=sys.stderr)
        rows += found
    print("\n".join(table(rows)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
