"""``spark-build dispatch ask|table``."""

from pathlib import Path
from typing import Annotated

import typer

from builder import settings
from builder.cli import typed as opt
from builder.cli.command import App, examples
from builder.common.console import console, counted
from builder.common.model.reference import Ref

app = App(
    help="Record the kernels that vLLM releases select.",
    epilog=examples("spark-build dispatch ask --releases 0.33.0", "spark-build dispatch table"),
)

_DOCS = Path("docs")

Evidence = Annotated[
    Path, typer.Option(help="Directory of the records, one file per release.", metavar="DIR")
]


@app.command(epilog=examples("spark-build dispatch ask --releases 0.20.1,0.33.0"))
def ask(
    releases: opt.Releases = None,
    evidence: Evidence = _DOCS / "evidence",
    real_extensions: Annotated[
        bool,
        typer.Option(
            "--real-extensions",
            help="Also load each release's operator library (from 0.20.0; 7 to 90 MB each).",
        ),
    ] = False,
    platform: opt.PlatformName = None,
    refresh: opt.Refresh = False,
    json: opt.Json = False,
) -> None:
    """Record which kernels releases select.

    Covers every backend that they offer, and each profile.
    """
    from builder.common.console import print_json
    from builder.common.pypi import PackageIndex, vllm_releases, write_atomically
    from builder.layers.catalog import Catalog
    from builder.layers.plan.sources import IndexSources
    from builder.pipeline import bases
    from builder.proof.recorded.documents import Records
    from builder.proof.recorded.record import RecordInputs, file_of, record_bytes, record_of

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
        print(f"{len(written)} records in {evidence}")


@app.command(epilog=examples("spark-build dispatch table", "spark-build dispatch table --check"))
def table(
    evidence: Evidence = _DOCS / "evidence",
    to: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = _DOCS
    / "dispatch.md",
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check whether the file is up to date (exit 9 if not)."),
    ] = False,
    json: opt.Json = False,
) -> None:
    """Write the release table from the records, or check it."""
    from builder.common.console import print_json
    from builder.common.pypi import write_atomically
    from builder.errors import Exit, SparkBuildError
    from builder.layers.catalog import Catalog
    from builder.proof.recorded.documents import TableFile
    from builder.proof.recorded.record import read_records, stale_records
    from builder.proof.recorded.table import render

    catalog = Catalog.discover()
    records = read_records(evidence)
    text = render(records, catalog)
    if json:
        print_json(TableFile(file=str(to), releases=len(records), written=not check))
    if not check:
        write_atomically(to, text.encode())
        if not json:
            print(f"{counted(len(records), 'release')} in {to}")
        return
    stale = stale_records(records, catalog)
    if stale:
        shown = ", ".join(stale[:6]) + (f" and {len(stale) - 6} more" if len(stale) > 6 else "")
        raise SparkBuildError(
            f"the records in {evidence} were made with other profiles: {shown}",
            Exit.STALE,
            hint="spark-build dispatch ask && spark-build dispatch table",
        )
    if not to.is_file() or to.read_text("utf-8") != text:
        raise SparkBuildError(
            f"{to} does not match the records in {evidence}",
            Exit.STALE,
            hint="spark-build dispatch table",
        )
    if not json:
        print(f"{to} is up to date")
