"""How the matrix is written: a self-contained HTML page of releases along time, Markdown, CSV."""

from __future__ import annotations

import base64
import calendar
import csv
import hashlib
import io
import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from builder.applier.values import all_match
from builder.common.document import load_toml
from builder.common.files import write_atomically
from builder.common.paths import data_dir, package_file
from builder.proof.checks import KINDS
from builder.proof.recorded import (
    kernel_versions,
    number_cell,
    number_records,
    read_records,
    rows,
)
from builder.proof.report import now, render_page

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.layers.catalog import Catalog, Profile
    from builder.layers.decisions import Evidence
    from builder.pipeline.matrix import Asked, Matrix, MatrixRow
    from builder.proof.recorded import Record


if TYPE_CHECKING:
    #: The diffs at a border: layer, row before it, row after it -> (file, diff) pairs.
    Diffs = Callable[[str, MatrixRow, MatrixRow], Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Mark:
    """A state as symbol, word and class of the page: no colour is needed to tell them apart."""

    symbol: str
    word: str
    name: str


MARKS = {
    "needed": Mark("●", "needed", "needed"),
    "upstream": Mark("✓", "upstream", "there"),
    "applied": Mark("=", "applied", "there"),
    "not-applicable": Mark("·", "not for it", "none"),
    "needs-rebuild": Mark("▲", "needs a rebuild", "work"),
    "drift": Mark("✕", "DRIFT", "work"),
    "ambiguous": Mark("?", "AMBIGUOUS", "work"),
}
_LEGEND = {
    "needed": "a build applies the patch",
    "upstream": "the release has the change in a form of its own",
    "applied": "the release has the same bytes",
    "not-applicable": "the patch is not for this release",
    "needs-rebuild": "compiled code would have to be built",
    "drift": "the text that the patch changes was not found: somebody must look",
    "ambiguous": "the text was found more than once: somebody must look",
}
TITLES = {
    "vllm": "vLLM",
    "flashinfer-python": "FlashInfer",
    "nvidia-cutlass-dsl": "CuTe DSL",
}


#: How a text names a page of the documentation.
_PAGE = re.compile(r"\bdocs/([\w./-]+)\.md\b")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring releases with the same answer."""

    first: str
    last: str
    span: int
    mark: Mark
    text: str
    #: what it links to
    id: str = ""

    @property
    def releases(self) -> str:
        """Its releases in words."""
        return self.first if self.span == 1 else f"{self.first} – {self.last}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of a timeline."""

    name: str
    about: str = ""
    profiles: tuple[str, ...] = ()
    runs: tuple[Run, ...]

    @property
    def busy(self) -> bool:
        """Whether somebody must look, or a patch is still needed in the newest release."""
        return any(run.mark.name == "work" for run in self.runs) or (
            self.runs[-1].mark.name == "needed"
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows under one heading."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A release."""

    version: str
    day: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Rows over the releases of one package."""

    id: str
    title: str
    about: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]

    @property
    def months(self) -> list[tuple[str, int]]:
        """Month and number of releases, in their order."""
        runs = groupby(self.columns, key=lambda column: column.day[:7])
        return [(_month(month), len(list(run))) for month, run in runs]


@dataclass(frozen=True, kw_only=True)
class At:
    """One release in a detail."""

    id: str
    version: str
    day: str
    reason: str = ""
    places: tuple[Evidence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What a run opens."""

    id: str
    title: str
    mark: Mark
    heading: str
    about: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    releases: tuple[At, ...] = ()
    diffs: tuple[tuple[str, str], ...] = ()
    before: str = ""


@dataclass
class _Page:
    """The parts of the page, as they are found."""

    catalog: Catalog
    diffs: Diffs
    timelines: list[Timeline] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)


_MONTHS = calendar.month_abbr


def _month(day: str) -> str:
    """``2026-05`` as ``May 26``."""
    return f"{_MONTHS[int(day[5:7])]} {day[2:4]}" if re.match(r"\d{4}-[01]\d", day) else ""


def write_page(asked: Asked, first: Matrix, file: Path, docs: str = "") -> None:
    """Write the page, with the releases of the other packages that these layers change.

    ``docs`` is where the documentation is, as a site.

    Raises:
        UsageError: the file cannot be written.
        RemoteError: the index does not respond.
    """
    text = matrix_page([first, *asked.others(first)], asked.catalog, asked.diffs, docs=docs)
    asked.store.save()
    write_atomically(file, text.encode())


def matrix_page(
    documents: Sequence[Matrix],
    catalog: Catalog,
    diffs: Diffs,
    time: datetime.datetime | None = None,
    docs: str = "",
) -> str:
    """A page for people, with one timeline for each package; everything foreign is escaped."""
    from markupsafe import Markup, escape

    def linked(text: str) -> Markup:
        """A text whose names of pages are links, if there is a site."""
        shown = str(escape(text))
        link = rf'<a href="{escape(docs)}/docs/\1.html">\g<0></a>'
        return Markup(_PAGE.sub(link, shown) if docs else shown)  # noqa: S704 - escaped

    page = _Page(catalog, diffs)
    for document in documents:
        _states(page, document)
        if document.package == "vllm":
            _defects(page, document)
            _kernels(page, document)
        if document.package == "flashinfer-python":
            _numbers(page, document)
    script = package_file("data", "matrix.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    states = {s for d in documents for row in d.rows for s in row.states.values()}
    newest = documents[0].rows[-1]
    return render_page(
        "matrix.html.j2",
        made=time or now(),
        script=script,
        script_digest=digest,
        docs=docs,
        linked=linked,
        timelines=page.timelines,
        details=page.details,
        legend=[(MARKS[s], _LEGEND[s]) for s in MARKS if s in states],
        profiles=list(catalog.profile_files),
        newest=newest,
        counts={s: sum(v == s for v in newest.states.values()) for s in MARKS},
        drifted=sum(len(document.drifted) for document in documents),
    )


# ------------------------------------------------------------------------------------------- states


def _states(page: _Page, document: Matrix) -> None:
    layers = [page.catalog.layer(name) for name in document.layers]
    groups = []
    if document.package == "vllm":
        profiles = [page.catalog.profile(name) for name in page.catalog.profile_files]
        lines = [_profile_line(profile, document.rows) for profile in profiles]
        groups.append(Group(title="Profiles: how many layers a build applies", lines=tuple(lines)))
    for package in dict.fromkeys(layer.package for layer in layers):
        of_it = [layer for layer in layers if layer.package == package]
        lines = [_layer_line(page, document, layer) for layer in of_it]
        title = f"Layers that change {TITLES.get(package, package)}"
        groups.append(Group(title=title, lines=tuple(lines)))
    title = TITLES.get(document.package, document.package)
    about = "Each layer on the wheels that a release pins."
    if document.package != "vllm":
        about = f"Each layer that changes {title}, by itself, on every release of it."
    page.timelines.append(
        Timeline(
            id=document.package, title=f"{title} releases", about=about,
            columns=_columns(document.rows), groups=tuple(groups),
        )
    )  # fmt: skip


def _columns(rows: Sequence[MatrixRow]) -> tuple[Column, ...]:
    columns = []
    for row in rows:
        notes = [f"yanked: {row.yanked or 'no reason given'}"] if row.yanked is not None else []
        notes += [f"built {row.builds} times"] if row.builds > 1 else []
        columns.append(Column(version=row.name, day=row.uploaded, note="; ".join(notes)))
    return tuple(columns)


def _runs(
    rows: Sequence[MatrixRow], answers: Sequence[Hashable]
) -> Iterator[tuple[Hashable, list[MatrixRow]]]:
    pairs = zip(rows, answers, strict=True)
    for answer, run in groupby(pairs, key=lambda pair: pair[1]):
        yield answer, [row for row, _ in run]


def _profile_line(profile: Profile, rows: Sequence[MatrixRow]) -> Line:
    runs = []
    answers = [
        sum(row.states.get(name) == "needed" for name in profile.layers)
        if all_match(profile.needs, row.packages)
        else -1
        for row in rows
    ]
    for count, run in _runs(rows, answers):
        mark = MARKS["not-applicable"] if count == -1 else MARKS["needed"]
        text = "not served" if count == -1 else f"{count}"
        runs.append(Run(first=run[0].name, last=run[-1].name, span=len(run), mark=mark, text=text))
    return Line(
        name=profile.name, about=profile.summary, profiles=(profile.name,), runs=tuple(runs)
    )


def _layer_line(page: _Page, document: Matrix, layer: Layer) -> Line:
    runs, before = [], None
    answers = [row.states.get(layer.name, "not-applicable") for row in document.rows]
    for state, run in _runs(document.rows, answers):
        mark = MARKS[str(state)]
        detail = _layer_detail(page, document, layer, run, before)
        page.details.append(detail)
        runs.append(
            Run(
                first=run[0].name, last=run[-1].name, span=len(run), mark=mark, text=mark.word,
                id=detail.id,
            )
        )  # fmt: skip
        before = run[-1]
    users = [n for n in page.catalog.profile_files if layer.name in page.catalog.profile(n).layers]
    return Line(name=layer.name, about=layer.summary, profiles=tuple(users), runs=tuple(runs))


def _layer_detail(
    page: _Page, document: Matrix, layer: Layer, run: Sequence[MatrixRow], before: MatrixRow | None
) -> Detail:
    name = layer.name
    scope = "" if document.package == "vllm" else f"{document.package}:"
    releases = [
        At(
            id=f"{scope}{name}:{row.name}", version=row.name, day=row.uploaded,
            reason=row.reasons.get(name, ""), places=row.evidence.get(name, ()),
        )
        for row in run
    ]  # fmt: skip
    since = run[0].since.get(name, "")
    facts = [("in the releases since", since)] if since else []
    known = {"bug": "reported as", "forwarded": "sent upstream"}
    for key, label in known.items():
        value = layer.provenance.get(key)
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")
        facts += [(label, text)] if text else []
    mark = MARKS[run[0].states.get(name, "not-applicable")]
    span = run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}"
    return Detail(
        id=f"at:{scope}{name}:{run[0].name}", title=name, mark=mark,
        heading=f"{TITLES.get(document.package, document.package)} {span}", about=layer.summary,
        facts=tuple(facts), releases=tuple(releases), before=before.name if before else "",
        diffs=tuple(page.diffs(name, before, run[0])) if before else (),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ defects


def _defects(page: _Page, document: Matrix) -> None:
    """Where each known defect of a kernel lives: where its layer is needed, or in its range."""
    lines = []
    for row in load_toml(package_file("data", "defects.toml"))["defect"]:
        present = [_present(row, release) for release in document.rows]
        runs = []
        for state, run in _runs(document.rows, present):
            mark = _PRESENCE[str(state)]
            detail = Detail(
                id=f"at:defect:{row['id']}:{run[0].name}", title=row["name"], mark=mark,
                heading=f"vLLM {run[0].name} to {run[-1].name}", about=row["effect"],
                facts=(
                    ("kernel", row["kernel"]), ("mended by", row.get("layer", "no layer")),
                    ("upstream", row["upstream"]), ("page", f"docs/{row['page']}"),
                ),
            )  # fmt: skip
            page.details.append(detail)
            runs.append(
                Run(
                    first=run[0].name, last=run[-1].name, span=len(run), mark=mark,
                    text=mark.word, id=detail.id,
                )
            )  # fmt: skip
        users = [
            n for n in page.catalog.profile_files
            if row.get("layer") in page.catalog.profile(n).layers
        ]  # fmt: skip
        lines.append(
            Line(name=row["name"], about=row["kernel"], profiles=tuple(users), runs=tuple(runs))
        )
    page.timelines.append(
        Timeline(
            id="defects", title="Known kernel defects",
            about="In the release as published: the profile's layers mend those that name one. "
            "What was run, and how, is in docs/kernel-defects.md.",
            columns=_columns(document.rows),
            groups=(Group(title="Defects of kernels for SM121", lines=tuple(lines)),),
        )
    )  # fmt: skip


_PRESENCE = {
    "present": Mark("!", "present", "needed"),
    "absent": Mark("·", "not there", "none"),
    "not-run": Mark("?", "not looked for", "none"),
}


def _present(defect: Mapping[str, Any], row: MatrixRow) -> str:
    if "not-run" in defect and all_match(defect["not-run"], row.packages):
        return "not-run"
    layer = defect.get("layer")
    here = all_match(defect["when"], row.packages)
    return "present" if here and (not layer or row.states.get(layer) == "needed") else "absent"


# ------------------------------------------------------------------------------------------ numbers


def _numbers(page: _Page, document: Matrix) -> None:
    """What level numbers computed with the kernels of those FlashInfer releases that it was run on.

    Each release is by itself: those between two of them were not run.
    """
    folder = data_dir("docs") / "evidence" / "numbers"
    if not folder.is_dir():  # an installed package has no records
        return
    by = {
        kernel_versions(record)[0]: {check["name"]: check for check in record["checks"]}
        for record in number_records(folder)
    }
    rows = [row for row in document.rows if row.name in by]
    names = dict.fromkeys(name for row in reversed(rows) for name in by[row.name])
    lines = [_numbers_line(page, rows, name, by) for name in names]
    if not rows:
        return
    page.timelines.append(
        Timeline(
            id="numbers", title="Values computed on a CPU",
            about="The kernels of these FlashInfer releases, unpatched, run without a GPU; other "
            "releases were not run (docs/kernel-defects.md).",
            columns=_columns(rows),
            groups=(
                Group(
                    title="Kernels of b12x",
                    lines=tuple(x for x in lines if any(run.id for run in x.runs)),
                ),
            ),
        )
    )  # fmt: skip


def _numbers_line(
    page: _Page,
    rows: Sequence[MatrixRow],
    check: str,
    by: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> Line:
    runs = []
    slug = re.sub(r"[^A-Za-z0-9]+", "-", check)
    for name in (row.name for row in rows):
        result = by[name].get(check)
        text = number_cell(result) if result else ""
        mark = _COMPUTED.get(text) or Mark("✕", text, "needed")
        detail = f"at:numbers:{slug}:{name}" if result and text else ""
        if result and text:
            page.details.append(
                Detail(
                    id=detail, title=check, mark=mark, heading=f"FlashInfer {name}",
                    about=f"Expected: {result['expected']}",
                    facts=(("seen", result["seen"]), ("where", result["where"])),
                )
            )  # fmt: skip
        runs.append(Run(first=name, last=name, span=1, mark=mark, text=mark.word, id=detail))
    return Line(name=check, runs=tuple(runs))


_COMPUTED = {
    "right": Mark("✓", "right", "there"),
    "not run": Mark("?", "not run", "none"),
    "": Mark("·", "no such kernel", "none"),
}


# ------------------------------------------------------------------------------------------ kernels


def _kernels(page: _Page, document: Matrix) -> None:
    """What SM121 selects by kind of layer, from the records of releases."""
    folder = data_dir("docs") / "evidence"
    if not folder.is_dir():  # an installed package has no records
        return
    known = {record.vllm: record for record in read_records(folder)}
    rows = [row for row in document.rows if row.vllm in known]
    if not rows:
        return
    records = [known[row.vllm] for row in rows]
    groups = [Group(title="By default", lines=tuple(_kind_lines(page, rows, records, "")))]
    for name in page.catalog.profile_files:
        lines = tuple(_kind_lines(page, rows, records, name))
        groups.append(Group(title=f"With {name}", lines=lines))
    page.timelines.append(
        Timeline(
            id="kernels", title="What SM121 selects",
            about="Each release's own vLLM, told that the device has compute capability 12.1. "
            "No GPU was used (docs/dispatch.md).",
            columns=_columns(rows), groups=tuple(groups),
        )
    )  # fmt: skip


def _kind_lines(
    page: _Page, rows: Sequence[MatrixRow], records: Sequence[Record], profile: str
) -> Iterator[Line]:
    for kind, words in KINDS.items():
        kinds_by_release = [r.kinds(profile) if profile else r.default for r in records]
        outcomes = [kinds[kind] if kinds else None for kinds in kinds_by_release]
        names = [o.kernel if o else "" for o in outcomes]
        by_release = dict(zip((row.name for row in rows), outcomes, strict=True))
        runs = []
        for kernel, run in _runs(rows, names):
            outcome = by_release[run[0].name]
            text = str(kernel) or "not served"
            refused = text in ("refused", "not known")
            mark = Mark("✕" if refused else "▪", text, "refused" if refused else "kernel")
            if not kernel:
                mark = MARKS["not-applicable"]
            message = (outcome.line or outcome.refused or outcome.not_applicable) if outcome else ""
            detail = Detail(
                id=f"at:kernel:{profile or 'default'}:{kind}:{run[0].name}", title=words, mark=mark,
                heading=f"vLLM {run[0].name} to {run[-1].name}",
                about=f"with {profile}" if profile else "by default, unpatched",
                facts=tuple((label, value) for label, value in (
                    ("kernel", outcome.selected if outcome else ""), ("the release says", message),
                ) if value),
            )  # fmt: skip
            page.details.append(detail)
            runs.append(
                Run(
                    first=run[0].name, last=run[-1].name, span=len(run), mark=mark, text=text,
                    id=detail.id,
                )
            )  # fmt: skip
        yield Line(name=words, profiles=(profile,) if profile else (), runs=tuple(runs))


# ----------------------------------------------------------------------------- as Markdown and CSV


#: Columns of the Markdown table, with their states.
#: No state: the layer before it makes the same change.
_AFTER = "after"
COLUMNS = {
    "needed": ("needed",),
    "in the release": ("upstream", "applied"),
    "made by a layer before it": (_AFTER,),
    "not for it": ("not-applicable",),
    "to look at": ("drift", "ambiguous", "needs-rebuild"),
}
_HEAD = (
    "package", "release", "uploaded", "yanked", "platform", "vllm", "layer", "state", "since",
    "file", "line", "anchor", "reason",
)  # fmt: skip


def markdown(document: Matrix) -> str:
    """Layers as rows; each cell has the releases with such a state."""
    body = []
    for name in document.layers:
        cells = [_ranges(document, name, states) for states in COLUMNS.values()]
        body.append([f"`{name}`", *cells])
    used = [n for n in range(len(COLUMNS)) if n < 2 or any(row[n + 1] for row in body)]
    head = ["layer", *(list(COLUMNS)[n] for n in used)]
    return rows(head, [[row[0], *(row[n + 1] for n in used)] for row in body]) + "\n"


def _ranges(document: Matrix, name: str, states: tuple[str, ...]) -> str:
    ranges = []
    pairs = [(_state(row, name) in states, row.name) for row in document.rows]
    for there, run in groupby(pairs, key=lambda pair: pair[0]):
        names = [release for _, release in run]
        if there:
            ranges.append(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
    return ", ".join(ranges)


def _state(row: MatrixRow, name: str) -> str:
    return _AFTER if name in row.after else row.states.get(name, "not-applicable")


def table(document: Matrix) -> str:
    """CSV: one line for each layer on each release, with the first place that decides."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEAD)
    for row in document.rows:
        for name in document.layers:
            if name not in row.states:
                continue
            place = next(iter(row.evidence.get(name, ())), None)
            where = (place.file, place.line or "", place.anchor) if place else ("", "", "")
            writer.writerow(
                [
                    document.package, row.release, row.uploaded,
                    "" if row.yanked is None else row.yanked or "yes", row.platform, row.vllm,
                    name, row.states[name], row.since.get(name, ""),
                    *map(_inert, map(str, where)), _inert(row.reasons[name]),
                ]
            )  # fmt: skip
    return out.getvalue()


def _inert(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" and text else text
