"""Write what is generated in this repository, or check it: ``python -m tests.generate``.

python -m tests.generate              write what takes seconds and needs no network
python -m tests.generate --check      only say what is stale, and which rows pages lack (exit 9)
python -m tests.generate --all        also what asks released wheels: minutes to an hour
python -m tests.generate mods         only these, by name (--list names them)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import chart, kernel_defects
from builder.diagnose import report
from builder.diagnose.entries import load_entries
from builder.errors import Exit
from builder.layers.catalog import Catalog
from builder.pipeline import layerexport
from builder.pipeline.mods import export, mod_files, outdated
from builder.pipeline.options import HOME
from builder.proof.checks import LEVELS
from builder.proof.recorded import number_records, read_records, render, stale_records
from builder.ptx import supported
from builder.serving.lintrules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (sys.executable, "-m")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Files that follow from others."""

    name: str
    #: what they are made from
    source: str
    #: what is stale below a root, in words; nothing if all is as it would be written
    stale: Callable[[Path], Iterable[str]]
    write: Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Files whose content comes from released wheels, by a command of their own."""

    name: str
    source: str
    command: tuple[str, ...]
    #: whether the command has ``--check``; else it is only run to write
    checks: bool = True


def text_file(name: str, source: str, make: Callable[[Path], str]) -> Generated:
    """One file of text; ``make`` gets the root that is read."""

    def stale(root: Path) -> Iterator[str]:
        path = root / name
        if not path.is_file() or path.read_text("utf-8") != make(root):
            yield name

    return Generated(
        name=name,
        source=source,
        stale=stale,
        write=lambda root: (root / name).write_text(make(root), "utf-8"),
    )


def block(name: str, source: str, mark: str, make: Callable[[], str]) -> Generated:
    """A part of a page, between two comments."""
    begin, end = f"<!-- {mark} -->\n", "<!-- end -->"

    def page(root: Path) -> str:
        return kernel_defects.page((root / name).read_text("utf-8"), make(), begin, end)

    return text_file(name, source, page)


# ------------------------------------------------------------------------------------------- makers


def _mods(root: Path) -> dict[Path, dict[str, tuple[bytes, int]]]:
    catalog = Catalog.discover()
    names = {catalog.profile(name).mod: name for name in catalog.profile_files}
    return {
        root / "mods" / mod: mod_files(mod, catalog.select([profile]))
        for mod, profile in names.items()
    }


def _stale_mods(root: Path) -> Iterator[str]:
    mods = _mods(root)
    for folder, files in mods.items():
        yield from (f"mods/{file}" for file in outdated(folder, files))
    for folder in (root / "mods").iterdir():
        if folder.is_dir() and folder not in mods:
            yield f"mods/{folder.name} belongs to no profile"


def _write_mods(root: Path) -> None:
    for folder, files in _mods(root).items():
        export(folder, files)


def _dispatch(root: Path) -> str:
    return render(read_records(root / "docs" / "evidence"), Catalog.discover())


def _defects(root: Path) -> str:
    folder = root / "docs" / "evidence" / "numbers"
    text = (root / "docs" / "kernel-defects.md").read_text("utf-8")
    text = kernel_defects.page(text, kernel_defects.table(number_records(folder)))
    package = kernel_defects.package_table(number_records(folder, "b12x-*.json"))
    return kernel_defects.page(text, package, kernel_defects.BEGIN_PACKAGE)


def _reports(root: Path) -> dict[Path, str]:
    """The text for each project, of the layer's page and the patch that was made of wheels."""
    catalog = Catalog.discover()
    texts = {}
    for name in layerexport.reports(catalog):
        patch = root / "docs" / "upstream" / name / "change.patch"
        text = layerexport.pull_request(
            catalog.layer(name), catalog.folders[name],
            patch.read_text("utf-8") if patch.is_file() else "", HOME,
        )  # fmt: skip
        texts[patch.with_name("pull-request.md")] = text
    return texts


def _stale_reports(root: Path) -> Iterator[str]:
    texts = _reports(root)
    for path, text in texts.items():
        if not path.is_file() or path.read_text("utf-8") != text:
            yield str(path.relative_to(root))
    for folder in (root / "docs" / "upstream").iterdir():
        if folder / "pull-request.md" not in texts:
            yield f"docs/upstream/{folder.name} belongs to no layer with {layerexport.PAGE}"


def _write_reports(root: Path) -> None:
    for path, text in _reports(root).items():
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, "utf-8")


def _chart(root: Path) -> str:
    return chart.draw(json.loads((root / "docs" / "registry_push.json").read_text("utf-8")))


def _rules() -> str:
    rows = [
        f"| `{r.id}` | {r.severity} | {r.summary} | {r.source} | {r.vllm or 'every'} | "
        f"{'; '.join(dict.fromkeys(filter(None, (r.first, r.last)))) or '-'} |\n"
        for r in RULES.values()
    ]
    head = "| rule | severity | what it finds | source | releases | what shows both ends |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(rows)


def model_names() -> list[str]:
    """The known models."""
    return sorted(path.stem for path in (ROOT / "builder" / "data" / "models").glob("*.toml"))


def _models() -> str:
    return ", ".join(f"`{name}`" for name in model_names()) + "\n"


#: Made in seconds, offline.
GENERATED = (
    Generated(
        name="mods",
        source="layers, profiles, the applier",
        stale=_stale_mods,
        write=_write_mods,
    ),
    Generated(
        name="docs/upstream/*/pull-request.md",
        source="patches/*/upstream.md, change.patch beside it",
        stale=_stale_reports,
        write=_write_reports,
    ),
    text_file("docs/dispatch.md", "docs/evidence/vllm-*.json", _dispatch),
    text_file("docs/diagnose.md", "builder/data/diagnose", lambda _: report.page(load_entries())),
    text_file("docs/ptx-instructions.md", "builder/ptx", lambda _: supported.page()),
    text_file("docs/kernel-defects.md", "docs/evidence/numbers", _defects),
    text_file("docs/registry_push.svg", "docs/registry_push.json", _chart),
    block("docs/lint.md", "the rules of lint", "rules", _rules),
    block("README.md", "builder/data/models", "models", _models),
)
#: Made of released wheels.
ASKED = (
    Asked(
        name="recipes",
        source="models, profiles, the newest release in docs/evidence",
        command=(*PYTHON, "builder", "recipes", "export"),
    ),
    Asked(
        name="tests/wheels/expected-states.toml",
        source="layers, released wheels",
        command=(*PYTHON, "tests.wheels.states"),
    ),
    Asked(
        name="docs/upstream/*/change.patch",
        source="layers with upstream.md, released wheels",
        command=(*PYTHON, "builder.pipeline.layerexport"),
        checks=False,
    ),
    Asked(
        name="builder/data/records.txt",
        source="the RECORDs of released wheels",
        command=(*PYTHON, "tests.released"),
        checks=False,
    ),
    Asked(
        name="tests/wheels/real-parsers.json",
        source="the parsers of released vLLMs",
        command=(*PYTHON, "tests.wheels.real_parsers"),
        checks=False,
    ),
    Asked(
        name="docs/evidence",
        source="what released vLLMs select",
        command=(*PYTHON, "builder", "dispatch", "ask"),
        checks=False,
    ),
)


# --------------------------------------------------------------------------------------------- rows


def missing_rows(root: Path = ROOT) -> Iterator[str]:
    """What pages are written by hand for, and lack."""
    catalog = Catalog.discover()
    wanted = {
        "README.md": [*catalog.profile_files, *LEVELS],
        "docs/profiles.md": [*catalog.profile_files, *catalog.folders],
        "docs/verification.md": list(LEVELS),
    }
    for page, names in wanted.items():
        text = (root / page).read_text("utf-8")
        yield from (f"{page} has no `{name}`" for name in names if f"`{name}`" not in text)
    records = stale_records(read_records(root / "docs" / "evidence"), catalog)
    yield from (f"docs/evidence is of another profile: {record}" for record in records[:6])
    for name in layerexport.reports(catalog):
        path = root / "docs" / "upstream" / name / "change.patch"
        if not path.is_file() or not layerexport.is_current(
            catalog.layer(name), path.read_text("utf-8")
        ):
            yield f"docs/upstream/{name}/change.patch is not of the layer as it is"
    table = (root / "tests/wheels/expected-states.toml").read_text("utf-8")
    yield from (
        f"tests/wheels/expected-states.toml has no {name}"
        for name in catalog.folders
        if f"[vllm.states.{name}]" not in table
    )


# ------------------------------------------------------------------------------------------ command


def run(
    names: Sequence[str], *, check: bool, everything: bool, root: Path = ROOT
) -> tuple[list[str], list[str]]:
    """Write or check; gives what was written or is stale, and what is missing in pages."""
    stale: list[str] = []
    for one in GENERATED:
        if names and one.name not in names:
            continue
        if wrong := list(one.stale(root)):
            stale += wrong
            if not check:
                one.write(root)
    for asked in ASKED:
        if asked.name in names or (everything and not names):
            stale += _ask(asked, check=check)
    return stale, [] if names else list(missing_rows(root))


def _ask(asked: Asked, *, check: bool) -> list[str]:
    if check and not asked.checks:
        print(f"{asked.name}: not checked; {' '.join(asked.command[1:])} writes it")
        return []
    command = [*asked.command, *(["--check"] if check else [])]
    return [asked.name] if subprocess.run(command, cwd=ROOT, check=False).returncode else []


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        usage="python -m tests.generate [--check] [--all] [NAME...]",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 9 if stale")
    parser.add_argument("--all", action="store_true", help="also what asks released wheels")
    parser.add_argument("--list", action="store_true", help="name what is generated, and from what")
    given = parser.parse_args(words)
    known = [one.name for one in (*GENERATED, *ASKED)]
    if given.list:
        for one in (*GENERATED, *ASKED):
            print(f"{one.name:<36}{one.source}")
        return 0
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    stale, missing = run(given.names, check=given.check, everything=given.all)
    if not given.check:
        print("\n".join([*(f"written: {name}" for name in stale)]) or "all was up to date")
        stale = []
    for line in (*(f"stale: {name}" for name in stale), *missing):
        print(f"error: {line}", file=sys.stderr)
    if stale:
        print("  try: python -m tests.generate", file=sys.stderr)
    return Exit.STALE if stale or missing else Exit.OK


if __name__ == "__main__":
    sys.exit(main())
