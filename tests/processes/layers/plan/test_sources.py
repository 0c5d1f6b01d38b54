"""Files of pinned wheels, as layers get them."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

from builder.applier.layers import InputPin
from builder.common.pypi import PackageIndex
from builder.layers.pinned import IndexSources
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    import pytest


def test_a_wheel_is_opened_once_for_all_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image takes thousands of files out of one wheel."""
    opened: list[str] = []
    original = zipfile.ZipFile.__init__

    def watched(archive: zipfile.ZipFile, file: Any, *words: Any, **more: Any) -> None:
        opened.append(str(file))
        original(archive, file, *words, **more)

    with FakeIndex() as index:
        name = index.add("lib", "1", {f"lib/m{n}.py": b"N = %d\n" % n for n in range(3)})
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        sources = IndexSources(PackageIndex())
        pin = InputPin("lib", "1", name, index.sha256(name))
        monkeypatch.setattr(zipfile.ZipFile, "__init__", watched)
        found = [sources.member(pin, f"lib/m{number}.py") for number in range(3)]
    assert found == [b"N = 0\n", b"N = 1\n", b"N = 2\n"]
    assert [name in file for file in opened].count(True) == 1
