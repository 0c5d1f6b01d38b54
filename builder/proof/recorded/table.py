"""The release table: the records as Markdown.

It depends only on the records, so the same records give the same text.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

from builder.common.paths import package_file
from builder.probes.dispatch_expect import describe, found, limit_of
from builder.proof.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.layers.catalog import Catalog, Profile
    from builder.proof.recorded import Outcome
    from builder.proof.recorded.documents import Record, WithProfile


T = TypeVar("T")

TEMPLATE = "dispatch.md.j2"


def render(records: Sequence[Record], catalog: Catalog) -> str:
    """The whole document, with expectations from the profiles."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(package_file("data")),
        autoescape=False,  # noqa: S701 - Markdown, made of the records of this checkout
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    profiles = [catalog.profile(name) for name in catalog.profile_files]
    return environment.get_template(TEMPLATE).render(
        first=records[0].vllm,
        last=records[-1].vllm,
        platforms=", ".join(sorted({r.base.platform for r in records})),
        default=default_table(records),
        profiles=[(p.name, *profile_parts(records, p)) for p in profiles],
        choices=[(words, choices_table(records, kind)) for kind, words in KINDS.items()],
        simulated=simulated_parts(records),
        real=ranges(records, [", ".join(record.real) for record in records]),
    )


def rows(header: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(header)
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)]
    return "\n".join(lines)


def default_table(records: Sequence[Record]) -> str:
    """Default kernels of releases, with a row for each run of equal ones."""
    cells = [[r.default[kind].kernel for kind in KINDS] for r in records]
    return _ranged(records, cells)


def profile_parts(
    records: Sequence[Record], profile: Profile
) -> tuple[str, list[str], list[tuple[str, str]]]:
    """A profile's table, its limits, and the settings that it uses over ranges of releases."""
    served = [r for r in records if r.kinds(profile.name) is not None]
    table = _ranged(served, [_cells(record, profile) for record in served])
    settings = [_settings(record.profiles.get(profile.name)) for record in records]
    return table, _limits(records, profile), ranges(records, settings)


def _ranged(records: Sequence[Record], cells: Sequence[list[str]]) -> str:
    """A table with a column for each kind, and a row for each run of equal releases."""
    body = [[where, *line] for where, line in ranges(records, cells)]
    return rows(["vLLM", *KINDS.values()], body)


def refused(record: Record, profile: Profile) -> set[str]:
    """Kinds that a release refuses with a profile, as expected."""
    expected = profile.expected(record.base.packages)
    return {e.kind for e in expected if e.refused} - set(unmet(record, profile))


def _limits(records: Sequence[Record], profile: Profile) -> list[str]:
    """Models that will not start with a profile, and in which releases."""
    kinds = [
        refused(record, profile) if record.kinds(profile.name) is not None else set()
        for record in records
    ]
    found = []
    for kind in KINDS:
        runs = [where for where, is_so in ranges(records, [kind in k for k in kinds]) if is_so]
        if runs:
            label = limit_of(kind, "").partition(":")[0]
            found.append(f"{label}: {', '.join(runs)}")
    return found


def unmet(record: Record, profile: Profile) -> dict[str, str]:
    """Kinds with another result than the profile expects, and the expectation."""
    kinds = record.kinds(profile.name)
    return {
        e.kind: describe(e)
        for e in profile.expected(record.base.packages)
        if kinds and found(e, kinds[e.kind].as_answer()) is None
    }


def _cells(record: Record, profile: Profile) -> list[str]:
    kinds, wrong = record.kinds(profile.name) or {}, unmet(record, profile)
    expected = {e.kind for e in profile.expected(record.base.packages)}
    cells = []
    as_expected = refused(record, profile)
    for kind in KINDS:
        kernel = kinds[kind].kernel
        if kind in as_expected:
            kernel = "expected refusal"
        if kind in wrong:
            kernel = f"{kernel} (EXPECTED {wrong[kind]})"
        cells.append(f"**{kernel}**" if kind in expected else kernel)
    return cells


def _settings(asked: WithProfile | None) -> str:
    """Layers that change files, variables and flags of a profile on one release."""
    if asked is None or asked.kinds is None:
        return f"not supported: {(asked and asked.not_served) or 'not recorded'}"
    put_on = [name for name, state in (asked.layers or {}).items() if state == "needed"]
    parts = [f"layers {', '.join(put_on)}"] if put_on else []
    parts += [f"`{name}={text}`" for name, text in sorted((asked.env or {}).items())]
    flags = asked.flags or ()
    parts += [f"`{' '.join(flags[i : i + 2])}`" for i in range(0, len(flags), 2)]
    return "; ".join(parts)


def choices_table(records: Sequence[Record], kind: str) -> str:
    """Every choice of a kind, with its results over ranges of releases; equal ones share a row."""
    known = dict.fromkeys(choice for r in records for choice in r.choices[kind])
    alike: dict[str, list[str]] = {}
    for choice in sorted(known, key=_order):
        results = [_result(record.outcomes(kind).get(choice)) for record in records]
        cells = [f"{where}: {what}" for where, what in ranges(records, results) if what]
        alike.setdefault("<br>".join(cells), []).append(f"`{choice}`")
    body = [["<br>".join(named), found] for found, named in alike.items()]
    return rows(["choice", "selected on SM121"], body)


def _order(choice: str) -> tuple[bool, bool, str]:
    return choice.startswith("--"), choice.startswith("a model"), choice


def _result(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return f"n/a ({outcome.not_applicable})" if outcome.not_applicable else outcome.kernel


def ranges(records: Sequence[Record], results: Sequence[T]) -> list[tuple[str, T]]:
    """Runs of releases with the same result, as text with the result."""
    runs = []
    pairs = zip(records, results, strict=True)
    for result, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        names = [record.vllm for record, _ in run]
        runs.append((names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", result))
    return runs


def simulated_parts(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Each simulated part, with its releases."""
    found = []
    for part in dict.fromkeys(part for record in records for part in record.simulated):
        present = ranges(records, [part in record.simulated for record in records])
        found.append((part, ", ".join(where for where, there in present if there)))
    return found
