"""The test files nearest to a change: ``python -m tests.changed [REF]``.

A test file is near if it changed since REF (default: where the branch left ``main``, or the last
commit on ``main``), imports a module that changed, or imports one that imports such a module; and a
test that names a data file that changed.  Everything is connected further away, so no more steps
are followed.  ``bootstrap.py --test --changed`` runs these, nearest first, for the inner loop; CI
runs everything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grimp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("builder", "tests", "benchmarks")
#: Imports that are followed, from a test to a changed module.
STEPS = 2


def git(*words: str) -> list[str]:
    """The lines that git prints."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def changed_since(ref: str) -> set[str]:
    """Paths that differ from a commit, those that git does not know yet included.

    Raises:
        CalledProcessError: git knows no such commit.
    """
    base = git("merge-base", ref, "HEAD")[0]
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def module_of(path: str) -> str:
    """The dotted name of a Python file."""
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def nearest(graph: grimp.ImportGraph, changed: Iterable[str]) -> list[str]:
    """The changed modules, then those that import them, and so on."""
    modules = sorted(module for module in changed if module in graph.modules)
    ahead = modules
    for _ in range(STEPS):
        importers = {name for one in ahead for name in graph.find_modules_that_directly_import(one)}
        ahead = sorted(importers.difference(modules))
        modules = [*modules, *ahead]
    return modules


def near_tests(graph: grimp.ImportGraph, paths: Iterable[str]) -> list[str]:
    """Test files, by path."""
    paths = set(paths)
    python = {module_of(path) for path in paths if path.endswith(".py")}
    tests = [f"{module.replace('.', '/')}.py" for module in nearest(graph, python)]
    names = {Path(path).name for path in paths if not path.endswith(".py")}
    for path in sorted(ROOT.glob("tests/**/test_*.py")) if names else ():
        text = path.read_text("utf-8")
        if any(name in text for name in names):
            tests.append(path.relative_to(ROOT).as_posix())
    if any(path.endswith(".md") for path in paths):
        tests.append("tests/unit/test_docs.py")
    is_test = re.compile(r"tests/.*/test_\w+\.py")
    return [
        name for name in dict.fromkeys(tests) if is_test.fullmatch(name) and (ROOT / name).is_file()
    ]


def default_ref() -> str:
    """What a branch left, or the last commit on ``main`` itself."""
    return "HEAD" if git("branch", "--show-current") == ["main"] else "main"


def main(words: Sequence[str]) -> int:
    """Print the files, one in a line."""
    try:
        paths = changed_since(words[0] if words else default_ref())
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip(), file=sys.stderr)
        return 2
    graph = grimp.build_graph(*PACKAGES, include_external_packages=False)
    print("\n".join(near_tests(graph, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
