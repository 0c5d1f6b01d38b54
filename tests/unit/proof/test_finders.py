"""What Python imports, derived from names: held against the Python that runs the tests."""

from __future__ import annotations

import importlib.util
import marshal
import platform
import random
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    PathFinder,
    SourceFileLoader,
)
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.proof.unrecorded import Finder, Naming, is_unchecked, may_run
from tests.unit.fakes import write_tree

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20_261_123
MACHINES = {"aarch64": "linux/arm64", "x86_64": "linux/amd64"}
HERE = Naming.of(
    f"{sys.version_info[0]}.{sys.version_info[1]}",
    MACHINES.get(platform.machine(), f"linux/{platform.machine()}"),
)
REAL = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
#: Without those of other builds of the same version.
EXACT = Naming(suffixes=tuple(s for s in HERE.suffixes if s in REAL), tags=HERE.tags)
#: Suffixes of which this Python imports some.
SUFFIXES = (*HERE.suffixes, ".cpython-39-x86_64-linux-gnu.so", ".pyd", ".pyo", ".py.bak", ".PY")


def test_every_suffix_of_this_python_is_known_in_its_order() -> None:
    assert EXACT.suffixes == REAL
    assert sys.implementation.cache_tag in HERE.tags


def random_folder(dice: random.Random) -> dict[str, bytes]:
    """A package with a few modules, most of them several times."""
    files = {"other.txt": b""}
    for _ in range(dice.randrange(1, 7)):
        stem, suffix = dice.choice("abc"), dice.choice(SUFFIXES)
        name = dice.choice((f"{stem}{suffix}", f"{stem}/__init__{suffix}", f"{stem}/x{suffix}"))
        if dice.random() < 0.1:  # a folder with the name of a file
            name += "/x.py"
        if not any(f"{p}/".startswith(f"{name}/") or name.startswith(f"{p}/") for p in files):
            files[name] = b""
    return files


def real_answer(root: Path, name: str) -> str | None:
    """What the import system finds, as the model writes it."""
    PathFinder.invalidate_caches()
    spec = PathFinder.find_spec(name, [str(root)])
    if spec is None:
        return None
    if spec.origin is None:
        return f"{name}/"
    return spec.origin.removeprefix(f"{root}/")


def test_the_model_agrees_with_this_python(tmp_path: Path) -> None:
    dice, contested = random.Random(SEED), 0
    for number in range(300):
        root = tmp_path / str(number)
        write_tree(root, random_folder(dice))
        finder = Finder(DirTree(root), EXACT)
        for name in "abc":
            found = finder.candidates("", name)
            assert (found[0] if found else None) == real_answer(root, name), root
            contested += len(found) > 1
    assert contested > 50


def test_the_model_of_compiled_files_agrees_with_this_python(tmp_path: Path) -> None:
    """What may run never misses what this Python runs; most of the rest is refused."""
    dice, ran, harmless = random.Random(SEED), 0, 0
    source = b"ANSWER = 'source'\n"
    code = importlib.util.MAGIC_NUMBER
    lie = compile("ANSWER = 'compiled'\n", "x.py", "exec")
    for number in range(300):
        path = tmp_path / str(number) / "x.py"
        path.parent.mkdir()
        path.write_bytes(source)
        stamp = int(path.stat().st_mtime)
        flags = dice.choice((0, 0, 1, 3, 2, 4, 7))
        if flags & 1:
            second = dice.choice((importlib.util.source_hash(source), bytes(8)))
        else:
            times = dice.choice((stamp, 0)).to_bytes(4, "little")
            second = times + dice.choice((len(source), 1)).to_bytes(4, "little")
        magic = dice.choice((code, code, code, b"\0\0\r\n", b"\0\0\n\n"))
        data = magic + flags.to_bytes(4, "little") + second + marshal.dumps(lie)
        data = data[: dice.choice((len(data), len(data), len(data), 10))]
        name = importlib.util.cache_from_source(str(path))
        path.parent.joinpath("__pycache__").mkdir()
        path.parent.joinpath("__pycache__", name.rpartition("/")[2]).write_bytes(data)
        space: dict[str, str] = {}
        exec(SourceFileLoader("x", str(path)).get_code("x") or "", space)
        runs = space["ANSWER"] == "compiled"
        assert may_run(data, source) or not runs, data
        assert not is_unchecked(data) or may_run(data, source)
        ran, harmless = ran + runs, harmless + (not may_run(data, source))
        assert Finder(DirTree(path.parent), HERE).compiled("x.py") == [
            f"__pycache__/{name.rpartition('/')[2]}"
        ]
    assert ran > 30
    assert harmless > 60


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("core.py", "core"),
        ("core.cpython-312-aarch64-linux-gnu.so", "core"),
        ("core.cpython-312t-aarch64-linux-musl.so", "core"),
        ("core.cpython-311-aarch64-linux-gnu.so", ""),
        ("core.cpython-312-x86_64-linux-gnu.so", ""),
        (".py", ""),
        ("a.b.py", ""),
        ("core.txt", ""),
    ],
)
def test_the_module_of_a_file(name: str, stem: str) -> None:
    assert Naming.of("3.12", "linux/arm64").stem(name) == stem
