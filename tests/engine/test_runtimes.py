"""Our reading of layers against what umoci and containerd unpack.

What is accepted is the same tree for all of them.  What is refused is refused by one of them, or is
something else for each, or is of the short list of what no builder writes.
"""

from __future__ import annotations

import os
import random
import re
from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import Descriptor
from builder.images.rootfs.image import LayerCache
from builder.images.rootfs.view import Rootfs
from tests.unit import tarcases
from tests.unit.imagefiles import put_image
from tests.unit.tarrules import LAYERS, READING

from . import runtimes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.tarrules import Rules

SEED = 20_261_122
#: How many of each kind; a larger run by hand sets the variable.
COUNT = int(os.environ.get("SPARK_BUILD_TEST_TARS", "120"))
BATCH = 250

#: What runtimes agree on and we refuse all the same, because no builder of images writes it, and
#: reading it would take more code than it is worth.
STRICTER = (
    r"leaves the root with '\.\.'",
    r"a sparse file",
    r"belongs to user",
    r"has mode",
    r"attributes of the overlay file system",
    r"more than 8 extension headers",
    r"not a directory in this layer",  # it goes through a link of the same layer
    r"is not an earlier file of the layer",  # a hard link that goes through a link
    r"which already has a hard link",
    r"it has /\S+ as \w+ and as \w+",
    r"hides everything below it",  # where nothing is below
    r"a whiteout of its own",
    r"its root is not a directory",
    r"it has a whiteout of /\S+, and a folder there",
    r"after it added folders there",
    r"is nowhere in the layers below it",  # but something else is in its place above
    r"a whiteout for some runtimes only",
    r"this is no layer of an image: an entry of -?\d+ bytes",
)


pytestmark = pytest.mark.usefixtures("root_for_runtimes")


def ours(layout: LayoutDirectory, blobs: list[Descriptor]) -> runtimes.Tree | str:
    """The tree as we read it, or what we say against it."""
    try:
        with_cache = Rootfs(blobs, LayerCache(layout))
        try:
            return _walk(with_cache, "")
        finally:
            with_cache.close()
    except RemoteError as error:
        return str(error)


def _walk(seen: Rootfs, top: str) -> runtimes.Tree:
    found: runtimes.Tree = {}
    for name in seen.names(top or "/"):
        path = f"{top}/{name}"
        entry = seen.lstat(path)
        assert entry is not None, path
        row, kind = entry.row, entry.kind
        text = {"file": row.sha256, "symlink": row.link}.get(kind, "")
        found[path[1:]] = kind, 0 if kind == "symlink" else row.mode, text
        if kind == "dir":
            found |= _walk(seen, path)
    return found


def judged(tmp_path: Path, cases: dict[str, list[bytes]]) -> dict[str, str]:
    """For each image of layer blobs: "same", why it is refused, or "WRONG" and how."""
    root = tmp_path / "layout"
    layout = LayoutDirectory(root)
    mine: dict[str, runtimes.Tree | str] = {}
    for name, layers in cases.items():
        manifest = put_image(root, *layers, name=name, config={"Labels": {"case": name}})
        blobs = [Descriptor.parse(layer, name) for layer in manifest.json()["layers"]]
        mine[name] = ours(layout, blobs)
    theirs = runtimes.unpacked(root, list(cases), tmp_path / "work")
    return {name: _verdict(mine[name], theirs[name]) for name in cases}


def _verdict(mine: runtimes.Tree | str, theirs: dict[str, runtimes.Tree | str]) -> str:
    assert theirs.keys() == set(runtimes.RUNTIMES)
    trees = [tree for tree in theirs.values() if not isinstance(tree, str)]
    agree = len(trees) == len(theirs) and all(_alike(tree, trees[0]) for tree in trees)
    if not isinstance(mine, str):
        if agree and _alike(mine, trees[0]):
            return "same"
        return f"WRONG: we see {mine}, they {theirs}"
    if agree and not any(re.search(reason, mine) for reason in STRICTER):
        return f"WRONG: all see {trees[0]}, and we say {mine}"
    return mine


def _alike(one: runtimes.Tree, two: runtimes.Tree) -> bool:
    if one.keys() != two.keys():
        return False
    for path, (kind, mode, text) in one.items():
        other = two[path]
        modes = {mode, other[1]} - {runtimes.UNSAID}
        if (kind, text) != (other[0], other[2]) or len(modes) > 1:
            return False
    return True


# ---------------------------------------------------------------------------------- rules, by hand


@pytest.mark.parametrize("rules", [READING, LAYERS], ids=["reading", "layers"])
def test_every_rule(tmp_path: Path, rules: Rules) -> None:
    names = {f"case-{number}": name for number, name in enumerate(rules)}
    found = judged(tmp_path, {tag: rules[name][0] for tag, name in names.items()})
    wrong = {
        name: found[tag]
        for tag, name in names.items()
        if not re.search(
            "^same$" if rules[name][1].startswith("= ") else rules[name][1], found[tag]
        )
    }
    assert not wrong


# ------------------------------------------------------------------------------------- by chance


@pytest.mark.parametrize("kind", ["headers", "layers"])
def test_random_tars(tmp_path: Path, kind: str) -> None:
    """Every case has a seed of its own, so that one can be tried alone."""
    same = 0
    for first in range(0, COUNT, BATCH):
        cases: dict[str, list[bytes]] = {}
        for number in range(first, min(first + BATCH, COUNT)):
            dice = random.Random(f"{SEED} {kind} {number}")
            made = (
                [tarcases.random_blob(dice)] if kind == "headers" else tarcases.random_layers(dice)
            )
            cases[f"case-{number}"] = made
        found = judged(tmp_path / str(first), cases)
        same += sum(verdict == "same" for verdict in found.values())
        wrong = [f"{name}: {said}" for name, said in found.items() if said.startswith("WRONG")]
        assert not wrong, "\n".join(wrong)
    print(f"{COUNT} {kind}, seed {SEED}: {same} read alike, {COUNT - same} refused")
    assert same > COUNT // 5, "most cases are refused, so that they show nothing"
