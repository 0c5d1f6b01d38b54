"""What the README and the documentation say is so: links, commands, names and numbers."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from builder.dispatch.record import read_records
from builder.errors import Exit
from builder.layers.catalog import Catalog
from builder.model.base import NEWEST_VLLM
from tests.unit.commandlines import parse, root

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
#: A layer that changes no file that vLLM runs.
IDLE = "b12x-env"


def names(paths: list[Path]) -> list[str]:
    """Names of tests."""
    return [path.name for path in paths]


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


def test_every_profile_is_in_the_readme_and_every_layer_in_the_documentation() -> None:
    catalog = Catalog.discover()
    for name in catalog.profile_files:
        assert f"\n| `{name}` |" in README
    profiles = (ROOT / "docs" / "profiles.md").read_text("utf-8")
    for name in catalog.folders:
        assert f"`{name}`" in profiles


def test_exit_codes_match_the_program() -> None:
    text = README.partition("## Exit codes")[2].partition("\n## ")[0]
    said = {
        int(number) for number in re.findall(r"(?:^|· ?)(\d+) [a-z]", text.replace("\n", " · "))
    }
    assert said == {int(code) for code in Exit}


def test_the_table_of_releases_matches_the_evidence() -> None:
    rows = re.findall(r"^\| (0\.\d+\.\d+) to (0\.\d+\.\d+) \| (.*?) \|", README, re.MULTILINE)
    table = README.partition("## Your vLLM release")[2].partition("\n## ")[0]
    ranges = [row for row in rows if f"| {row[0]} to {row[1]} | {row[2]} |" in table]
    assert len(ranges) == 5
    (profile,) = Catalog.discover().select(["b12x-full"]).profiles
    mends = set(profile.mends)
    assert mends < set(profile.layers)
    for record in read_records(ROOT / "docs" / "evidence"):
        version = Version(record.vllm)
        (verdict,) = [w for a, b, w in ranges if Version(a) <= version <= Version(b)]
        assert "CUTLASS" in record.default["nvfp4-linear"].line.upper(), "by default"
        asked = record.profiles.get("b12x-full")
        layers = (asked and asked.layers) or {}
        needed = {name for name, state in layers.items() if state == "needed"} - {IDLE}
        mended = "only for kernel defects" if needed & mends else "no, settings are enough"
        wanted = "**needed**" if needed - mends else mended if layers else "does not help"
        assert verdict.startswith(wanted), record.vllm


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
