"""What the README and the documentation say is so: links, commands, names and numbers."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from builder import bootstrap
from builder.common.reference import NEWEST_VLLM
from builder.errors import Exit
from builder.layers.catalog import Catalog
from builder.proof.checks import DEFAULT_LEVELS, LEVELS
from builder.proof.recorded import read_records
from tests.unit.commandlines import parse, root

if TYPE_CHECKING:
    from builder.proof.recorded import Record

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
REPORTS = [*sorted(ROOT.glob("patches/*/*.md")), *sorted(ROOT.glob("docs/upstream/*/*.md"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *REPORTS]
#: A layer that changes no file that vLLM runs.
IDLE = "b12x-env"


def names(paths: list[Path]) -> list[str]:
    """Names of tests."""
    return [str(path.relative_to(ROOT)) for path in paths]


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_have_a_target(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def command_lines(text: str) -> list[str]:
    """Calls of spark-build in the shell blocks of a page, each in one line."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = [re.split(r"(?:^|/|\| *|\()spark-build(?= [a-z])", line, maxsplit=1) for line in lines]
    calls += [re.split(r"builder/bootstrap\.py(?= [a-z])", line, maxsplit=1) for line in lines]
    return [call[1].strip() for call in calls if len(call) == 2]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_are_valid(page: Path) -> None:
    for line in command_lines(page.read_text("utf-8")):
        words = shlex.split(line, comments=True)
        words = words[: next((i for i, w in enumerate(words) if w in ("|", ">", "&&")), None)]
        parse(words)


@pytest.mark.parametrize(
    "command",
    [
        "python3 builder/bootstrap.py image --layers b12x-full",
        "python3 builder/bootstrap.py --test",
    ],
)
def test_the_two_commands_of_the_repository(command: str) -> None:
    assert f"```sh\n{command}\n```" in README


def test_every_command_is_in_the_readme() -> None:
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    assert set(root().commands) <= set(re.findall(r"`([a-z-]+)`", table))


def test_exit_codes_match_the_program() -> None:
    text = README.partition("## Exit codes")[2].partition("\n## ")[0]
    said = {
        int(number) for number in re.findall(r"(?:^|· ?)(\d+) [a-z]", text.replace("\n", " · "))
    }
    assert said == {int(code) for code in Exit}


ROW = re.compile(
    r"^\| (0\.\d+\.\d+)(?: to (0\.\d+\.\d+))? \| (.*?) \|(.*?)\|(.*?)\|$", re.MULTILINE
)
KINDS = {"nvfp4-linear": "FlashInferB12xNvFp4LinearKernel", "nvfp4-moe": "FLASHINFER_B12X"}
#: The layers that make values right, by what computes them.
CURES = {
    "linear": {"flashinfer-b12x-store-wait"},
    "MoE": {
        "flashinfer-b12x-moe-barrier",
        "flashinfer-b12x-moe-rows",
        "vllm-b12x-experts-scales",
    },
}


def selectable(record: Record) -> str:
    """How the README says which kinds of layers an unpatched release gives b12x, if asked."""
    linear, moe = (
        any(kernel == one.selected for name, one in record.outcomes(kind).items() if "b12x" in name)
        for kind, kernel in KINDS.items()
    )
    return "yes" if linear and moe else "**only MoE**" if moe else "**no**"


def test_the_table_of_releases_matches_the_evidence() -> None:
    table = README.partition("## Your vLLM release")[2].partition("\n## ")[0]
    rows = ROW.findall(table)
    (profile,) = Catalog.discover().select(["b12x-full"]).profiles
    fixes = set(profile.fixes)
    assert fixes < set(profile.layers)
    assert fixes >= set().union(*CURES.values())
    for record in read_records(ROOT / "docs" / "evidence"):
        version = Version(record.vllm)
        ((selected, right, flags),) = [
            row[2:] for row in rows if Version(row[0]) <= version <= Version(row[1] or row[0])
        ]
        assert "CUTLASS" in record.default["nvfp4-linear"].line.upper(), "by default"
        asked = record.profiles["b12x-full"]
        if asked.layers is None:
            assert selected.startswith("no, nor patched"), record.vllm
            continue
        needed = {name for name, state in asked.layers.items() if state == "needed"} - {IDLE}
        assert selected.startswith(selectable(record)), record.vllm
        assert (selectable(record) == "yes") == (not needed - fixes), "what a plan says"
        for flag in asked.flags or ():
            same = "same" in flags or "--moe-backend" in flag
            assert flag in flags or same or flag == "flashinfer_b12x", record.vllm
        if selectable(record) == "**no**":
            assert not right.strip(), "no kernel, no values"
            continue
        for kind, cures in CURES.items():
            word = re.search(rf"{kind}: (\*\*no\*\*|yes)", right)
            assert word is not None
            assert (word[1] == "yes") == (not needed & cures), f"{record.vllm} {kind}"


def test_the_levels_are_in_the_readme_in_their_order() -> None:
    table = README.partition("## Verification")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(LEVELS)
    assert tuple(LEVELS)[:3] == DEFAULT_LEVELS
    assert "The first three run by default." in table


def test_what_the_first_command_prints() -> None:
    """The figures of the sample are those of the mods and of the layers on that release."""
    sample = README.partition("The output ends like this")[2].partition("\n## ")[0]
    (profile,) = Catalog.discover().select(["b12x-full"]).profiles
    release = profile.pypi.rpartition("==")[2]
    assert f"vLLM {release} needs a patch for b12x-full" in sample
    (record,) = [r for r in read_records(ROOT / "docs" / "evidence") if r.vllm == release]
    layers = record.profiles["b12x-full"].layers or {}
    needed = [name for name, state in layers.items() if state == "needed" and name != IDLE]
    assert f"{len(needed)} layers change files, 1 sets variables only" in sample
    for state, name in re.findall(r"^  (needed|not-applicable) +([\w-]+) ", sample, re.MULTILINE):
        assert layers[name] == state
    assert f"vllm/vllm-openai:v{release} and the overlay" in sample
    assert set(re.findall(r"b12x-full[:-](\d[\d.]*\d)", sample)) == {release}


def test_the_figure_of_the_disk_is_that_of_the_tests() -> None:
    assert f"about {bootstrap._TEST_DISK / 1e9:.0f} GB of disk" in README


def test_the_newest_release_is_the_newest_with_a_record() -> None:
    newest = read_records(ROOT / "docs" / "evidence")[-1].vllm
    assert newest == NEWEST_VLLM
    for file in (ROOT / "builder").rglob("*.py"):
        for named in re.findall(r'hint="[^"]*--release ([\d.]+)', file.read_text("utf-8")):
            assert named == newest, file
    for profile in Catalog.discover().select(sorted(Catalog.discover().profile_files)).profiles:
        assert profile.newest == newest, profile.name


def test_extras_match_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    sources = [*PAGES, *(ROOT / "builder").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    for source in sources:
        for found in re.findall(r"(?:spark-build|'\.)\[([a-z,]+)\]", source.read_text("utf-8")):
            assert set(found.split(",")) <= extras, f"{source}: {found}"
