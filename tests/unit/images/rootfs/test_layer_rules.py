"""Every rule by which runtimes read layers, as we keep it; the runtimes are asked elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError
from tests.unit.imagefiles import view_of
from tests.unit.tarrules import LAYERS, READING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.images.rootfs.view import Rootfs


def shown(seen: Rootfs, top: str = "") -> Iterator[str]:
    """What is in the image, as the rules write it."""
    for name in seen.names(top or "/"):
        path = f"{top}/{name}"
        entry = seen.lstat(path)
        assert entry is not None
        end = {"dir": "/", "symlink": f"->{entry.row.link}", "file": f":{entry.row.size}"}
        yield path[1:] + end.get(entry.kind, "?")
        yield from shown(seen, path) if entry.kind == "dir" else ()


@pytest.mark.parametrize("name", [*READING, *LAYERS])
def test_rule(tmp_path: Path, name: str) -> None:
    layers, said = {**READING, **LAYERS}[name]
    seen = view_of(tmp_path / "layout", *layers)
    if said.startswith("= "):
        assert "= " + " ".join(shown(seen)) == said
        return
    with pytest.raises(RemoteError, match=said):
        list(shown(seen))


@pytest.mark.parametrize("question", ["/v/a", "/v", "/nothing"])
@pytest.mark.parametrize("top", ["whiteout below a link", "file below a link, then a folder"])
def test_every_accepted_layer_means_the_same_to_every_runtime(
    tmp_path: Path, top: str, question: str
) -> None:
    """Nobody asks for the link; one runtime has changed what it leads to."""
    with pytest.raises(RemoteError, match="runtimes handle this differently"):
        view_of(tmp_path / "layout", *LAYERS[top][0]).stat(question)
