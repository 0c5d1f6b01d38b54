"""What a release understands is read once, and again when what it was read from is another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.common.paths import cache_dir
from builder.common.results import Results
from builder.serving import serveflags
from tests.unit.fakes import write_tree

from .release import KERNEL, files

if TYPE_CHECKING:
    from pathlib import Path

#: A configuration whose values are in a module beyond those that are read first.
ELSEWHERE = {"config/kernel": KERNEL.replace('Shade = Literal["dark", "light"]',
                                             "from vllm.shades import *")}  # fmt: skip
SHADES = 'from typing import Literal\nShade = Literal["{}"]\n'


def shades(tree: DirTree) -> tuple[str, ...]:
    flag = serveflags.interface_in(tree, "1.2.3").flag("--shade")
    assert flag is not None
    return flag.choices


@pytest.fixture
def tree(tmp_path: Path) -> DirTree:
    write_tree(tmp_path / "site", files(ELSEWHERE))
    return DirTree(tmp_path / "site")


def test_the_same_files_are_read_once(tree: DirTree, monkeypatch: pytest.MonkeyPatch) -> None:
    first = serveflags.interface_in(tree, "1.2.3")
    monkeypatch.setattr(serveflags, "read_interface", lambda *_: pytest.fail("read again"))
    assert serveflags.interface_in(tree, "1.2.3") == first


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"interface": {}, "files": {}}', b"\0" * 9])
def test_a_damaged_entry_is_read_again(tree: DirTree, damage: bytes) -> None:
    first = serveflags.interface_in(tree, "1.2.3")
    (entry,) = (cache_dir() / "interfaces").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage)
    assert serveflags.interface_in(tree, "1.2.3") == first
    assert entry.read_bytes() == whole


def test_a_file_that_is_another_or_new_is_read(tree: DirTree) -> None:
    assert shades(tree) == ()
    for value in ("dim", "bright"):
        write_tree(tree.root, {"vllm/shades.py": SHADES.format(value).encode()})
        assert shades(tree) == (value,)
    assert len(list((cache_dir() / "interfaces").iterdir())) == 1


def test_another_reader_reads_again(tree: DirTree, monkeypatch: pytest.MonkeyPatch) -> None:
    serveflags.interface_in(tree, "1.2.3")
    other = serveflags._RESULTS.programs[:-1]
    monkeypatch.setattr(serveflags, "_RESULTS", Results("interfaces", other, 200))
    monkeypatch.setattr(serveflags, "read_interface", lambda *_: pytest.fail("read again"))
    with pytest.raises(pytest.fail.Exception, match="read again"):
        serveflags.interface_in(tree, "1.2.3")
