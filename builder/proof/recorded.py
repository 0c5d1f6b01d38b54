"""What each release selects, and what level ``numbers`` reports about it, recorded."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, field

from builder.applier.files import DOCUMENT, read_regular
from builder.applier.layers import Compile
from builder.applier.values import canonical_json, sha256_hex
from builder.common.document import Count, Digest, Document, Part, Text, always, plain, read
from builder.common.paths import package_file
from builder.common.plan import State
from builder.errors import UsageError
from builder.probes.dispatch_expect import (
    Answer,
    Failure,
    describe,
    found,
    headline,
    limit_of,
)
from builder.proof.checks import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.layers.catalog import Catalog, Profile, Selection


#: A refusal caused by the sandbox, which lacks a module (Triton) that installations have.
_LACKING = "ModuleNotFoundError"
#: Maximum length of a refusal in the evidence.
_LONGEST = 200


class Outcome(Part, frozen=True, kw_only=True):
    """The result of one query to vLLM: a kernel, a refusal, or why it cannot be queried."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": [key]} for key in ("selected", "refused", "not-applicable")]
    }

    selected: Text = ""
    line: Annotated[Text, Meta(description="the log line that shows it")] = ""
    refused: Text = ""
    not_applicable: Text = field(default="", name="not-applicable")

    @classmethod
    def of(cls, answer: Answer) -> Outcome:
        """From a reply of the dispatch probe."""
        if answer.not_applicable:
            return cls(not_applicable=answer.not_applicable)
        summary = headline(answer)
        if answer.error:
            return cls(refused=summary if len(summary) <= _LONGEST else f"{summary[:_LONGEST]}...")
        line = "" if summary.startswith("selected ") else summary.split(" out of ")[0]
        return cls(selected=str(answer.selected), line=line)

    def as_answer(self) -> Answer:
        """The equivalent reply of the dispatch probe, to compare with an expectation."""
        error = Failure("", self.refused) if self.refused else None
        lines = (self.line,) if self.line else ()
        return Answer(selected=self.selected or None, lines=lines, error=error)

    @property
    def kernel(self) -> str:
        """The kernel without the common words of its kind, else the result."""
        if self.not_applicable:
            return "n/a"
        if self.refused.startswith(_LACKING):
            return "not known"
        if self.refused:
            return "refused"
        name = self.selected.rpartition(".")[2]
        for common in ("ScaledMMLinearKernel", "ScaledMMKernel", "LinearKernel"):
            name = name.removesuffix(common)
        return name


def setting(request: Mapping[str, Any]) -> str:
    """A setting in the user's notation: variables, a flag, or a model's type."""
    words = [f"{name}={value}" for name, value in request.get("env", {}).items()]
    flags = [name for name in ("linear_backend", "moe_backend") if name in request]
    words += [f"--{name.replace('_', '-')} {request[name]}" for name in flags]
    if "linear_backend_per_quant" in request:
        value = {"linear_backend_per_quant": request["linear_backend_per_quant"]}
        words.append(f"--kernel-config '{json.dumps(value)}'")
    if "model_type" in request:
        words.append(f"a model of type {request['model_type']}")
    return " ".join(words)


# --------------------------------------------------------------------------------------- documents


class AskedBase(Part, frozen=True, kw_only=True):
    """The wheels of a record."""

    platform: Text
    digest: Digest
    packages: dict[str, Text]


class WithProfile(Part, frozen=True, kw_only=True):
    """Kernels that a release selects with a profile; empty without support by the profile."""

    inputs: Annotated[Text, Meta(description="identity of the profile's layers, pins and range")]
    not_served: Text = field(default="", name="not-served")
    layers: dict[str, State] | None = None
    env: dict[str, str] | None = None
    flags: tuple[Text, ...] | None = None
    kinds: dict[str, Outcome] | None = None


class Alone(Part, frozen=True, kw_only=True):
    """Kernels of an unpatched release, by default and with each of its choices."""

    default: dict[str, Outcome]
    choices: Annotated[
        dict[str, dict[str, Text | Outcome]],
        Meta(description="by kind of layer and choice; a kernel is given by its name"),
    ]
    simulated: tuple[Text, ...]
    real: tuple[Text, ...]

    def outcomes(self, kind: str) -> dict[str, Outcome]:
        """The result of each choice of a kind."""
        by_choice = self.choices[kind].items()
        return {c: Outcome(selected=o) if isinstance(o, str) else o for c, o in by_choice}


class Record(Alone, frozen=True, kw_only=True):
    """All results of one release."""

    schema: Literal[1] = always(1)
    vllm: Text
    base: AskedBase
    profiles: dict[str, WithProfile]

    def kinds(self, profile: str) -> dict[str, Outcome] | None:
        """The result for each kind of layer with a profile; None without support by the profile."""
        recorded = self.profiles.get(profile)
        return recorded.kinds if recorded else None


class Records(Document, frozen=True, kw_only=True):
    """Selected kernels of releases, as stored in docs/evidence."""

    records: Annotated[tuple[Record, ...], Meta(min_length=1)]


class TableFile(Document, frozen=True, kw_only=True):
    """The release table that was written, or checked."""

    file: Text
    releases: Annotated[Count, Meta(description="rows of the table")]
    written: Annotated[bool, Meta(description="false with --check")]


# --------------------------------------------------------------------------------------- recording
#
# A record names its wheels and profiles, so that a stale one, which no longer
# matches this checkout's profiles, is found without new queries.

#: Keys of a layer without effect: descriptions.
_PROSE = ("summary", "description", "provenance", "notes", "reason")


def inputs_digest(selection: Selection) -> str:
    """Digest of a profile's layers, pins and range."""
    value = {
        "layers": [_without_prose(layer.rendered) for layer in selection.layers if decides(layer)],
        "pins": selection.pins(),
        "needs": [dict(profile.needs) for profile in selection.profiles],
    }
    return sha256_hex(canonical_json(value))[:16]


def decides(layer: Layer) -> bool:
    """Whether a layer can affect the selection, which only Python code decides.

    Machine code has no effect on it.
    """
    return not all(isinstance(op, Compile) for op in layer.ops) or any(
        variant.serve_flags or variant.moe_serve_flags for variant in layer.variants
    )


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_prose(v) for k, v in value.items() if k not in _PROSE}
    if isinstance(value, list | tuple):
        return [_without_prose(item) for item in value]
    return value


# --- files ---------------------------------------------------------------------------------------


def file_of(folder: Path, release: str) -> Path:
    """The path of a release's record."""
    return folder / f"vllm-{release}.json"


def record_bytes(record: Record) -> bytes:
    """A record as bytes: readable in a diff, and reproducible."""
    return json.dumps(plain(record), indent=1, sort_keys=True).encode() + b"\n"


def read_records(folder: Path) -> list[Record]:
    """All records of a directory, oldest release first.

    Raises:
        UsageError: no record exists, or one is malformed.
    """
    from packaging.version import Version

    records = []
    for path in folder.glob("vllm-*.json"):
        try:
            record = read(json.loads(read_regular(path, DOCUMENT)), Record)
            Version(record.vllm)
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not a record of a release: {error}") from None
        if file_of(folder, record.vllm) != path:
            raise UsageError(f"{path} is not a record of that release: it is of {record.vllm}")
        records.append(record)
    if not records:
        raise UsageError(f"no record of a release in {folder}", hint="spark-build dispatch ask")
    return sorted(records, key=lambda record: Version(record.vllm))


def stale_records(records: Iterable[Record], catalog: Catalog) -> list[str]:
    """Stale records: those made with other profiles than this checkout's."""
    now = {name: inputs_digest(catalog.select([name])) for name in catalog.profile_files}
    return [
        f"vllm {record.vllm}: {name}"
        for record in records
        for name in sorted({*now, *record.profiles})
        if name not in record.profiles or record.profiles[name].inputs != now.get(name)
    ]


# --------------------------------------------------------------------------------------- the table
#
# It depends only on the records, so the same records give the same text.

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
    limits = []
    for kind in KINDS:
        runs = [where for where, is_so in ranges(records, [kind in k for k in kinds]) if is_so]
        if runs:
            label = limit_of(kind, "").partition(":")[0]
            limits.append(f"{label}: {', '.join(runs)}")
    return limits


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
    body = [["<br>".join(named), outcome] for outcome, named in alike.items()]
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
    parts = []
    for part in dict.fromkeys(part for record in records for part in record.simulated):
        present = ranges(records, [part in record.simulated for record in records])
        parts.append((part, ", ".join(where for where, there in present if there)))
    return parts


# ------------------------------------------------------------------------------ level numbers


def number_records(folder: Path, pattern: str = "vllm-*.json") -> list[dict[str, Any]]:
    """The evidence, a record for each release of vLLM or of the package.

    Raises:
        ValueError: a file is no such record.
    """
    read_records = []
    for path in sorted(folder.glob(pattern)):
        try:
            record = json.loads(read_regular(path, DOCUMENT))
            kernel_versions(record)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not what verify --json prints: {error}") from None
        read_records.append(record)
    if not read_records:
        raise ValueError(f"{folder} has no {pattern}")
    return read_records


def kernel_versions(record: Mapping[str, Any]) -> tuple[str, str]:
    """FlashInfer and CuTe DSL."""
    where = str(record["checks"][0]["where"])
    match = re.match(r"FlashInfer (\S+) \+ CuTe DSL (\S+) of", where)
    if match is None:
        raise ValueError(f"its first check names no FlashInfer and CuTe DSL: {where!r}")
    return match[1], match[2]


def number_cell(check: Mapping[str, Any]) -> str:
    """One result in a few words; nothing where a release has no such kernel."""
    if check.get("moot"):
        return ""
    if check["status"] != "fail":
        return {"pass": "right", "not-run": "not run"}[check["status"]]
    wrong = "wrong values" if check["seen"].startswith("wrong values") else ""
    race = "race" if "race, " in check["seen"] else ""
    return " and ".join(part for part in (wrong, race) if part) or "does not run"
