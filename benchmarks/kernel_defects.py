"""The tables of docs/kernel-defects.md, from what level ``numbers`` found.

Each file of docs/evidence/numbers is what this printed, for one release:

    spark-build verify pypi:vllm==RELEASE --layers b12x-full --level numbers --json

and those of the package b12x this:

    spark-build verify 'pypi:vllm[b12x]==RELEASE' --layers b12x-full --level numbers --json
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from builder.proof.recorded import kernel_versions, number_cell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOCS = Path(__file__).parents[1] / "docs"
PAGE, EVIDENCE = DOCS / "kernel-defects.md", DOCS / "evidence" / "numbers"
BEGIN = "<!-- of evidence/numbers -->\n"
BEGIN_PACKAGE = "<!-- of evidence/numbers/b12x-*.json -->\n"
END = "<!-- end -->"
#: What the names of the package's checks begin with.
PACKAGE = "package b12x, "


def table(given: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kernel, a column for each release."""
    made = sorted(given, key=lambda record: Version(kernel_versions(record)[0]))
    heads = ["FlashInfer", *(kernel_versions(record)[0] for record in made)]
    lines = [
        heads,
        ["---"] * len(heads),
        ["CuTe DSL", *(kernel_versions(record)[1] for record in made)],
    ]
    by = [{check["name"]: check for check in record["checks"]} for record in made]
    # the latest release has all kernels, in their order
    for name in dict.fromkeys(name for checks in reversed(by) for name in checks):
        row = [number_cell(checks[name]) if name in checks else "" for checks in by]
        if any(row):
            lines.append([name, *row])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def package_table(given: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kernel of the package b12x, a column for each of its releases.

    Raises:
        ValueError: a record has no check of the package.
    """
    by: dict[str, dict[str, Mapping[str, Any]]] = {}
    dsl: dict[str, str] = {}
    for record in given:
        checks = [check for check in record["checks"] if str(check["name"]).startswith(PACKAGE)]
        found = checks and re.match(r"b12x (\S+) \+ CuTe DSL (\S+) of", str(checks[0]["where"]))
        if not found:
            raise ValueError(f"{record['target']} has no check of the package b12x")
        dsl[found[1]] = found[2]
        by[found[1]] = {check["name"].removeprefix(PACKAGE): check for check in checks}
    releases = sorted(by, key=Version)
    heads = ["package b12x", *releases]
    lines = [heads, ["---"] * len(heads), ["CuTe DSL", *(dsl[release] for release in releases)]]
    for name in dict.fromkeys(name for release in reversed(releases) for name in by[release]):
        cells = (
            number_cell(by[release][name]) if name in by[release] else "" for release in releases
        )
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(text: str, content: str, begin_mark: str = BEGIN, end_mark: str = END) -> str:
    """The page with other content between two marks.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begin, rest = text.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"the page lacks {begin_mark.strip()} or {end_mark}")
    return f"{before}{begin}{content}{end}{after}"
