"""What a release understands is read once, and again when what it was read from is another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.serving import interface
from builder.util.paths import cache_dir
from builder.verify.results import Results
from tests.unit.fakes import write_tree

from .release import KERNEL, files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called
    from tests.wheels.fakeindex import FakeIndex

READING = "reading the arguments of vLLM 1.2.3"
#: A configuration whose values are in a module beyond those that are read first.
ELSEWHERE = {"config/kernel": KERNEL.replace('Shade = Literal["dark", "light"]',
                                             "from vllm.shades import *")}  # fmt: skip
SHADES = 'from typing import Literal\nShade = Literal["{}"]\n'


def shades(tree: DirTree) -> tuple[str, ...]:
    flag = interface.interface_in(tree, "1.2.3").flag("--shade")
    assert flag is not None
    return flag.choices


@pytest.fixture
def tree(tmp_path: Path) -> DirTree:
    write_tree(tmp_path / "site", files(ELSEWHERE))
    return DirTree(tmp_path / "site")


@pytest.mark.parametrize("command", ["memory", "lint"])
def test_the_second_command_needs_no_network(
    wheels: FakeIndex, spark_build: Callable[..., Called], tmp_path: Path, command: str
) -> None:
    wheels.add("vllm", "1.2.3", files())
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve m --shade bright\n", "utf-8")
    words = {"memory": ["nemotron-3-super"], "lint": [str(script)]}[command]
    first = spark_build(command, *words, "--release", "1.2.3", "--json")
    assert READING in first.err
    wheels.__exit__()
    second = spark_build(command, *words, "--release", "1.2.3", "--json")
    assert (second.code, second.out) == (first.code, first.out)
    assert READING not in second.err


def test_the_same_files_are_read_once(tree: DirTree, monkeypatch: pytest.MonkeyPatch) -> None:
    first = interface.interface_in(tree, "1.2.3")
    monkeypatch.setattr(interface, "read_interface", lambda *_: pytest.fail("read again"))
    assert interface.interface_in(tree, "1.2.3") == first


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"interface": {}, "files": {}}', b"\0" * 9])
def test_a_damaged_entry_is_read_again(tree: DirTree, damage: bytes) -> None:
    first = interface.interface_in(tree, "1.2.3")
    (entry,) = (cache_dir() / "interfaces").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    assert interface.interface_in(tree, "1.2.3") == first
    assert entry.read_bytes() == whole


def test_a_file_that_is_another_or_new_is_read(tree: DirTree) -> None:
    assert shades(tree) == ()
    for value in ("dim", "bright"):
        write_tree(tree.root, {"vllm/shades.py": SHADES.format(value).encode()})
        assert shades(tree) == (value,)
    assert len(list((cache_dir() / "interfaces").iterdir())) == 1


def test_another_reader_reads_again(tree: DirTree, monkeypatch: pytest.MonkeyPatch) -> None:
    interface.interface_in(tree, "1.2.3")
    other = interface._RESULTS.programs[:-1]
    monkeypatch.setattr(interface, "_RESULTS", Results("interfaces", other, 200))
    monkeypatch.setattr(interface, "read_interface", lambda *_: pytest.fail("read again"))
    with pytest.raises(pytest.fail.Exception, match="read again"):
        interface.interface_in(tree, "1.2.3")
