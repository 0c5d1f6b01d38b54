"""``spark-build matrix``, and ``dispatch ask`` and ``table``: released vLLMs compared."""

import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from builder import settings
from builder.applier.files import DOCUMENT, read_regular
from builder.cli.command import Group, command
from builder.common.console import console, counted, print_json, some_of, tell
from builder.common.hints import again
from builder.common.options import Json, Option, PlatformName, Refresh, Releases
from builder.errors import Exit, SparkBuildError, UsageError
from builder.pipeline.options import MatrixOptions, OutdatedOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.pipeline.matrix import Matrix, MatrixRow


_SHORT = {
    "needed": "needed",
    "applied": "applied",
    "upstream": "upstream",
    "not-applicable": "-",
    "needs-rebuild": "REBUILD",
    "drift": "DRIFT",
    "ambiguous": "AMBIGUOUS",
}

#: Columns of a terminal that every table fits into.
_WIDTH = 100


_FORMATS = ("table", "markdown", "csv", "json")


@command(
    "matrix",
    "spark-build matrix -l b12x-full --releases 0.20.1,0.22.1,0.33.0",
    "spark-build matrix --html matrix.html",
    "spark-build matrix --mods ./fix.patch --format markdown",
    "spark-build matrix --package flashinfer-python",
    "spark-build matrix -l b12x-full --dispatch --json",
)
def matrix(
    options: MatrixOptions,
    *,
    form: Annotated[
        str, Option("How to print it.", "|".join(_FORMATS), "--format", complete=_FORMATS)
    ] = "table",
    html: Annotated[
        Path | None,
        Option("Also write a self-contained HTML page, with releases of every package.", "FILE"),
    ] = None,
    docs: Annotated[
        str | None, Option("Let the page link to the documentation's site there.", "URL")
    ] = None,
    json: Json = False,
) -> None:
    """Print the table; exit 4 if a layer drifted, 5 if an expected kernel is not selected."""
    from builder.pipeline import matrixpage
    from builder.pipeline.matrix import Asked

    if form not in _FORMATS:
        raise UsageError(f"--format {form} is not one of {', '.join(_FORMATS)}")
    if docs is not None and html is None:
        raise UsageError("--docs is for the page of --html", hint=again("--html", "matrix.html"))
    asked = Asked(options)
    document = asked.matrix()
    rows = document.rows
    if html is not None:
        from builder.pipeline.matrixpage import write_page

        write_page(asked, document, html, (docs or "").rstrip("/"))
    if json or form == "json":
        print_json(document)
    elif form != "table":
        print({"markdown": matrixpage.markdown, "csv": matrixpage.table}[form](document), end="")
    else:
        _print_tables(document, options)
    _say_unread(asked.unread)
    if drifted := document.drifted:
        lines = [
            f"{name} on {document.package} {row.name}: {row.reasons[name]}" for name, row in drifted
        ]
        hint = f"spark-build layers show {drifted[0][0]}"
        raise SparkBuildError("\n  ".join(lines), Exit.DRIFT, hint=hint)
    failed = [
        f"vllm {row.vllm}: {check.name}: {check.seen}"
        for row in rows
        for check in row.dispatch or ()
        if check.status == "fail"
    ]
    if failed:
        raise SparkBuildError("\n  ".join(failed), Exit.VERIFY_FAILED)


def _print_tables(document: "Matrix", options: MatrixOptions) -> None:
    rows = document.rows
    print_table(document.layers, rows, listed=bool(options.releases))
    if options.dispatch:
        _print_dispatch(rows)
    if options.choices:
        _print_choices(rows)


def _say_unread(texts: "Sequence[str]") -> None:
    """What of the mods could not be read, below the table; also in a pipe."""
    sys.stdout.flush()
    for text in texts:
        console.warn(text)


def _print_dispatch(rows: "Sequence[MatrixRow]") -> None:
    tell("\nkernels: by default, and as planned")
    for row in rows:
        if not row.served:
            tell(f"{row.vllm:<12}the profile does not support this release")
        for check in row.dispatch or ():
            word = "expected refusal" if check.refusal else check.status
            default = check.reason.rpartition(": ")[2]
            tell(f"{row.vllm:<12}{check.name:<15}{word:<18}{default}")
            tell(_wrapped(check.seen.split(" out of ")[0], 45))


def _print_choices(rows: "Sequence[MatrixRow]") -> None:
    from builder.common.document import plain

    for row in rows:
        for kind, by_choice in (row.choices or {}).items():
            tell(f"\nvllm {row.vllm}, unpatched, {kind}")
            for choice, outcome in by_choice.items():
                what, text = next(iter(plain(outcome).items()))
                shown = _wrapped(text if what == "selected" else f"{what}: {text}", 45)
                name = f"  {choice or '(nothing set)':<43}"
                tell(f"{name}{shown.lstrip()}" if len(name) == 45 else f"{name}\n{shown}")


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def print_table(names: "Sequence[str]", rows: "Sequence[MatrixRow]", *, listed: bool) -> None:
    """Layers as rows, releases as columns; neighbours with the same states are one column."""
    served = [row for row in rows if row.served]
    columns = [
        _Column(_heading([row.name for row in run], listed=listed), states)
        for states, run in groupby(served, key=lambda row: [_cell(row, n) for n in names])
    ]
    first = max(map(len, names))
    wide = first + sum(column.width + 2 for column in columns) <= _WIDTH
    gap = "  " if wide else " "
    while columns:
        fitting, room = 0, _WIDTH - first
        while fitting < len(columns) and (room := room - columns[fitting].width - len(gap)) >= 0:
            fitting += 1
        part, columns = columns[: fitting or 1], columns[fitting or 1 :]
        for number in range(max(len(column.heading) for column in part)):
            _print_row(gap, "".ljust(first), part, [column.heading[number:][:1] for column in part])
        for number, name in enumerate(names):
            _print_row(gap, name.ljust(first), part, [[column.cells[number]] for column in part])
        tell()
    others = [row.name for row in rows if not row.served]
    if others:
        tell(f"Not supported by the profile: {_run(others) if not listed else ', '.join(others)}")
    tell(
        "needed: a build applies it. applied, upstream: the release has it. -: not for this release"
    )
    if any(row.after for row in served):
        print("after LAYER: that layer makes the same change before it")


def _cell(row: "MatrixRow", name: str) -> str:
    """The state of a layer; of one whose change a layer before it makes, that layer."""
    return f"after {row.after[name]}" if name in row.after else _SHORT[row.states[name]]


class _Column(NamedTuple):
    """A run of releases with the same states."""

    heading: list[str]
    cells: list[str]

    @property
    def width(self) -> int:
        """The widest of its texts."""
        return max(map(len, (*self.heading, *self.cells)))


def _heading(releases: list[str], *, listed: bool) -> list[str]:
    """The releases of a column, in lines; a range only if no release was left out."""
    if listed or len(releases) < 3:
        return releases
    return [f"{releases[0]} -", releases[-1]]


def _run(releases: list[str]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


def _print_row(gap: str, name: str, columns: list[_Column], cells: list[list[str]]) -> None:
    texts = [
        f"{''.join(cell):<{column.width}}" for column, cell in zip(columns, cells, strict=True)
    ]
    tell(gap.join([name, *texts]).rstrip())


_dispatched = Group(
    "dispatch", "spark-build dispatch ask --releases 0.33.0", "spark-build dispatch table"
)
_DOCS = Path("docs")

Evidence = Annotated[Path, Option("Directory of the records, one file per release.", "DIR")]


@_dispatched.sub("ask", "spark-build dispatch ask --releases 0.20.1,0.33.0")
def ask(
    releases: Releases = None,
    evidence: Evidence = _DOCS / "evidence",
    *,
    real_extensions: Annotated[
        bool,
        Option("Also load each release's operator library (from 0.20.0; 7 to 90 MB each)."),
    ] = False,
    platform: PlatformName = None,
    refresh: Refresh = False,
    json: Json = False,
) -> None:
    """Record which kernels releases select.

    Covers every backend that they offer, and each profile.
    """
    from builder.common.files import write_atomically
    from builder.common.pypi import PackageIndex, vllm_releases
    from builder.common.reference import Ref
    from builder.layers.catalog import Catalog
    from builder.layers.pinned import IndexSources
    from builder.pipeline import bases
    from builder.proof.recorded import Records, file_of, record_bytes
    from builder.proof.recording import RecordInputs, record_of

    if real_extensions:
        settings.choose(settings.REAL_EXTENSIONS, "1")
    index = PackageIndex(refresh=refresh)
    asking = RecordInputs(
        catalog=Catalog.discover(),
        sources=IndexSources(index),
        identify=lambda release, selection: bases.identify_base(
            Ref(f"pypi:vllm=={release}"), selection, index, platform=platform
        ),
    )
    written = []
    for release in vllm_releases(index, releases):
        with console.step(f"vllm {release}"):
            record = record_of(release, asking)
        write_atomically(file_of(evidence, release), record_bytes(record))
        written.append(record)
    if json:
        print_json(Records(records=tuple(written)))
    else:
        tell(f"{len(written)} records in {evidence}")


@_dispatched.sub("table", "spark-build dispatch table", "spark-build dispatch table --check")
def table(
    evidence: Evidence = _DOCS / "evidence",
    to: Annotated[Path, Option("The file to write.", "FILE")] = _DOCS / "dispatch.md",
    *,
    check: Annotated[
        bool, Option("Only check whether the file is up to date (exit 9 if not).")
    ] = False,
    json: Json = False,
) -> None:
    """Write the release table from the records, or check it."""
    from builder.common.files import write_atomically
    from builder.layers.catalog import Catalog
    from builder.proof.recorded import TableFile, read_records, render, stale_records

    catalog = Catalog.discover()
    records = read_records(evidence)
    text = render(records, catalog)
    if json:
        print_json(TableFile(file=str(to), releases=len(records), written=not check))
    if not check:
        write_atomically(to, text.encode())
        if not json:
            tell(f"{counted(len(records), 'release')} in {to}")
        return
    stale = stale_records(records, catalog)
    if stale:
        raise SparkBuildError(
            f"the records in {evidence} were made with other profiles: {some_of(stale, 6)}",
            Exit.STALE,
            hint="spark-build dispatch ask && spark-build dispatch table",
        )
    if not to.is_file() or read_regular(to, DOCUMENT).decode() != text:
        raise SparkBuildError(
            f"{to} does not match the records in {evidence}",
            Exit.STALE,
            hint="spark-build dispatch table",
        )
    if not json:
        tell(f"{to} is up to date")


@command(
    "outdated",
    "spark-build outdated -l b12x-full --since 0.32.0",
    "spark-build outdated --min-age 7d --check",
    detail="Prints Markdown, for the text of a pull request.",
)
def outdated(options: OutdatedOptions, *, json: Json = False) -> None:
    """Print the report; with ``--check`` exit 9 if there is something to do."""
    from builder.serving.outdated import markdown
    from builder.serving.outdated import outdated as report

    document = report(options)
    if json:
        print_json(document)
    else:
        print(markdown(document), end="")
    if options.check and document.anything:
        raise SparkBuildError(
            f"vLLM has a release after {document.since}, or a wheel is not what it was",
            Exit.STALE,
            hint="spark-build lock --upgrade",
        )
