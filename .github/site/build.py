"""Build the documentation as a site, with the picture of `matrix --html` as its front page.

    build.py --picture matrix.html --repository https://github.com/OWNER/spark-build SITE

The pages are those of the repository, at the same paths.  A link to a file or an anchor that is not
there ends with an error.  The generator is that of requirements.txt.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Pages beside those in docs/.
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
#: How pages name this project.
NAMED = "https://github.com/OWNER/spark-build"
#: Headings of the list of pages, and the pages in docs/ below each; the others follow.
GROUPS = {
    "Start": ["one-spark", "two-sparks", "what-runs-where", "troubleshooting", "glossary"],
    "Before you start a model": ["preflight", "serving", "lint", "dispatch", "profiles", "device"],
    "What upstream did": ["matrix", "outdated", "lock", "kernel-defects", "upstream/*/*"],
    "Build and publish": ["building", "images", "builders", "registries", "publishing"],
    "Proof": ["verification", "hopper", "ptx", "ptx-instructions", "diagnose"],
    "Layers": ["layers", "pull-requests", "compiling", "kernel-authors", "architecture"],
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--picture", type=Path, required=True, help="the page of matrix --html")
    parser.add_argument("--repository", default=NAMED, help="where other files are")
    parser.add_argument("site", type=Path, help="the folder to write, which must not exist")
    given = parser.parse_args()
    if given.site.exists():
        parser.error(f"{given.site} already exists")
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name)
        stage(pages, given.repository.rstrip("/"))
        command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going"]
        done = subprocess.run(
            [*command, "-b", "html", "-c", HERE, "-d", pages / ".doctrees", pages, given.site],
            check=False,
        )
    if done.returncode:
        return done.returncode
    shutil.copy(given.picture, given.site / "index.html")
    (given.site / ".nojekyll").touch()
    for rest in (".buildinfo", "objects.inv"):
        (given.site / rest).unlink(missing_ok=True)
    (given.site / "_sources").rmdir()
    print(f"{len(list(given.site.rglob('*.html')))} pages in {given.site}")
    return 0


def stage(pages: Path, repository: str) -> None:
    """Write the pages, with links that lead to the repository where they leave them."""
    files = [ROOT / name for name in PAGES]
    files += [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".svg")]
    staged = {path.relative_to(ROOT).as_posix() for path in files}
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8")
        target.write_text(
            linked(text, name, staged, repository) if path.suffix == ".md" else text, "utf-8"
        )
    (pages / "index.md").write_text("\n".join(contents(sorted(staged))), "utf-8")


def linked(text: str, page: str, staged: set[str], repository: str) -> str:
    """A page whose links to files that are no pages lead to the repository."""

    def lead(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if not target or ":" in target or path in staged:
            return match[0]
        if not (ROOT / path).exists():
            return match[0]  # which the generator then reports
        form = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{match[1]}{repository}/{form}/main/{path}{mark}{anchor}{match[3]}"

    return LINK.sub(lead, text).replace(NAMED, repository)


def contents(staged: list[str]) -> Iterator[str]:
    """The page that lists all others; the picture takes its place on the site."""
    pages = [name.removesuffix(".md") for name in staged if name.endswith(".md")]
    left = dict.fromkeys(pages)
    yield "# What each release needs on SM121\n"
    groups = {**GROUPS, "More": ["*", "*/*", "*/*/*/*"]}
    for title, names in groups.items():
        wanted = [f"docs/{name}" for name in names] if title != "More" else names
        own = ["README"] if title == "Start" else []
        own += [page for name in wanted for page in pages if Path(page).match(name)]
        listed = [page for page in dict.fromkeys(own) if page in left]
        for page in listed:
            del left[page]
        if listed:
            yield from ("```{toctree}", f":caption: {title}", ":hidden:", "", *listed, "```", "")


if __name__ == "__main__":
    sys.exit(main())
