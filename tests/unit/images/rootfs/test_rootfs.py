"""Layers as a container sees them: whiteouts, links, replaced folders; and only what is needed."""

from __future__ import annotations

import random
import tarfile
from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError
from builder.images.rootfs import index
from builder.images.rootfs.index import LayerIndex
from tests.unit.chance import CASES
from tests.unit.imagefiles import Item, folder, hardlink, packed, symlink, tar_of, view_of

if TYPE_CHECKING:
    from pathlib import Path

    from builder.images.rootfs.view import Rootfs


def view(root: Path, *layers: list[Item]) -> Rootfs:
    return view_of(root / "layout", *(packed(tar_of(*items)) for items in layers))


def tree(seen: Rootfs, top: str = "/") -> dict[str, object]:
    """Everything below a folder: bytes of files, targets of links, None for folders."""
    found: dict[str, object] = {}
    for name in seen.names(top):
        path = f"{top.rstrip('/')}/{name}"
        entry = seen.lstat(path)
        assert entry is not None, path
        if entry.kind == "dir":
            found[path] = None
            found |= tree(seen, path)
        elif entry.kind == "symlink":
            found[path] = f"-> {entry.row.link}"
        else:
            found[path] = seen.read(path)
    return found


# ------------------------------------------------------------------------------------- whiteouts


def test_upper_files_replace_lower_ones(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("a", b"1"), Item("b", b"2")], [Item("a", b"3", mode=0o600)])
    assert tree(seen) == {"/a": b"3", "/b": b"2"}
    entry = seen.stat("/a")
    assert entry is not None
    assert entry.row.mode == 0o600


def test_a_whiteout_hides_only_one_file(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("d/a", b"1"), Item("d/ab", b"2")], [Item("d/.wh.a")])
    assert tree(seen) == {"/d": None, "/d/ab": b"2"}


def test_a_whiteout_hides_a_folder_with_its_contents(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("d/e/a"), Item("d/f")], [Item("d/.wh.e")])
    assert tree(seen) == {"/d": None, "/d/f": b""}
    assert seen.stat("/d/e/a") is None
    assert seen.below("/d") == {"f": seen.lstat("/d/f")}


def test_a_hidden_file_can_be_added_again(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("d/a", b"1")], [Item("d/.wh.a")], [Item("d/a", b"2")])
    assert tree(seen) == {"/d": None, "/d/a": b"2"}
    seen = view(tmp_path, [Item("d/a", b"1")], [Item(".wh.d")], [Item("d/b", b"2")])
    assert tree(seen) == {"/d": None, "/d/b": b"2"}


def test_an_opaque_folder_hides_its_earlier_contents(tmp_path: Path) -> None:
    lower = [Item("d/a", b"1"), Item("d/e/b", b"2"), Item("f", b"3")]
    seen = view(tmp_path, lower, [Item("d/c", b"4"), Item("d/.wh..wh..opq")])
    assert tree(seen) == {"/d": None, "/d/c": b"4", "/f": b"3"}
    assert seen.below("/d").keys() == {"c"}


def test_aufs_markers_are_not_files(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item(".wh..wh.plnk"), Item(".wh..wh.aufs"), Item("a")])
    assert tree(seen) == {"/a": b""}


# ------------------------------------------------------------------ folders, files, links in place


def test_a_file_that_replaces_a_folder_hides_its_contents(tmp_path: Path) -> None:
    layers: list[list[Item]] = [[Item("d/a"), Item("d/e/b")], [Item("d", b"file")]]
    assert tree(view(tmp_path, *layers)) == {"/d": b"file"}
    assert view(tmp_path, *layers).below("/") == {"d": view(tmp_path, *layers).lstat("/d")}
    layers.append([folder("d/"), Item("d/c", b"1")])
    assert tree(view(tmp_path, *layers)) == {"/d": None, "/d/c": b"1"}


def test_a_folder_entry_replaces_a_link_and_an_upper_link_a_folder(tmp_path: Path) -> None:
    base = [Item("real/a", b"1"), symlink("d", "real")]
    seen = view(tmp_path, base, [folder("d"), Item("d/b", b"2")])
    assert tree(seen, "/d") == {"/d/b": b"2"}
    seen = view(tmp_path, [Item("d/a", b"1")], [symlink("d", "e"), Item("e/b", b"2")])
    assert seen.names("/d") == ["b"]


def test_the_topmost_folder_entry_decides(tmp_path: Path) -> None:
    seen = view(
        tmp_path,
        [folder("d", 0o700, uid=5), Item("d/a")],
        [folder("d", 0o1777, uid=7, gid=8)],
        [Item("d/b")],
    )
    entry = seen.stat("/d")
    assert entry is not None
    assert (entry.row.mode, entry.row.uid, entry.row.gid) == (0o1777, 7, 8)
    assert seen.names("/d") == ["a", "b"]


def test_a_later_entry_in_the_same_layer_wins(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("a", b"1"), folder("d", 0o700), Item("a", b"22"), folder("d")])
    assert tree(seen) == {"/a": b"22", "/d": None}
    entry = seen.stat("/d")
    assert entry is not None
    assert entry.row.mode == 0o755


def test_links_are_followed_inside_the_image(tmp_path: Path) -> None:
    seen = view(
        tmp_path,
        [
            Item("usr/lib/x", b"1"),
            symlink("lib", "usr/lib"),
            symlink("abs", "/usr/lib/x"),
            symlink("out", "../../../../../usr/lib/x"),
            symlink("usr/up", ".."),
            symlink("loop", "loop2"),
            symlink("loop2", "loop"),
            symlink("nowhere", "/etc/passwd"),
        ],
    )
    for path in ("/lib/x", "/abs", "/out", "/usr/up/lib/x", "/usr/up/usr/up/abs"):
        assert seen.read(path) == b"1", path
        assert seen.realpath(path) == "/usr/lib/x"
    for path in ("/loop", "/loop/x", "/nowhere", "/abs/x", "/usr/lib/x/y", "/usr/lib/x/.."):
        assert seen.stat(path) is None, path
    assert seen.names("/lib") == ["x"]
    assert seen.names("/usr/lib/x") == []


def test_a_chain_of_links_has_the_limit_of_linux(tmp_path: Path) -> None:
    links = [symlink(f"l{n}", f"l{n + 1}") for n in range(60)]
    seen = view(tmp_path, [*links, Item("l60", b"1")])
    assert seen.read("/l20") == b"1"
    assert seen.read("/l0") is None


def test_hard_links_have_the_content_of_their_target(tmp_path: Path) -> None:
    lower = [Item("cache/a", b"1", mode=0o640, uid=3), hardlink("site/a", "cache/a")]
    upper = [Item("c", b"2"), hardlink("d", "c"), hardlink("e", "/d"), Item("cache/.wh.a")]
    seen = view(tmp_path, lower, upper)
    assert tree(seen) == {
        "/c": b"2", "/cache": None, "/d": b"2", "/e": b"2",
        "/site": None, "/site/a": b"1",
    }  # fmt: skip
    entry = seen.below("/site")["a"]
    assert (entry.row.mode, entry.row.uid, entry.row.size) == (0o640, 3, 1)


@pytest.mark.parametrize("again", [Item("a", b"new"), symlink("a", "c"), hardlink("a", "c")])
def test_replacing_a_file_does_not_change_its_hard_links(tmp_path: Path, again: Item) -> None:
    """On a disk the link keeps the old bytes, which nothing names any more."""
    first = [Item("c"), Item("a", b"old"), hardlink("b", "a"), again]
    with pytest.raises(RemoteError, match="replaces /a, which already has a hard link"):
        view(tmp_path / "own", first).stat("/b")
    before = [Item("c"), again, Item("a", b"new"), hardlink("b", "a")]
    seen = view(tmp_path / "before", [Item("a", b"old"), Item("c")], before)
    assert seen.read("/b") == b"new", "the other way round is plain"


def test_hard_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    seen = view(tmp_path, [hardlink("a", "b"), hardlink("b", "c"), hardlink("c", "a")])
    with pytest.raises(RemoteError, match="not an earlier file"):
        seen.stat("/a")


def test_a_hard_link_to_a_link_is_that_link(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("a", b"1")], [symlink("l", "a"), hardlink("h", "l")])
    assert seen.read("/h") == b"1"
    entry = seen.lstat("/h")
    assert entry is not None
    assert entry.kind == "symlink"


def test_absolute_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    links = [symlink("a", "/b"), symlink("b", "/a/x"), symlink("d/e", "/d/e"), symlink("f", "/f")]
    seen = view(tmp_path, links)
    for path in ("/a", "/b", "/a/x", "/d/e", "/d/e/y", "/f/../f"):
        assert seen.stat(path) is None
        assert seen.names(path) == []
        assert seen.read(path) is None


def test_an_opaque_folder_hides_only_lower_layers(tmp_path: Path) -> None:
    seen = view(
        tmp_path,
        [Item("d/a", b"1"), Item("d/e/b", b"2"), Item("d/keep", b"3")],
        [Item("d/.wh..wh..opq"), Item("d/keep", b"4"), Item("d/e/c", b"5")],
        [Item("d/top", b"6"), Item("d/e/d", b"7")],
    )
    assert tree(seen) == {
        "/d": None, "/d/e": None, "/d/e/c": b"5", "/d/e/d": b"7", "/d/keep": b"4", "/d/top": b"6",
    }  # fmt: skip
    assert seen.below("/d").keys() == {"e", "e/c", "e/d", "keep", "top"}
    assert seen.stat("/d/a") is None
    assert seen.stat("/d/e/b") is None


def test_a_whiteout_and_a_new_file_in_the_same_layer(tmp_path: Path) -> None:
    """As builders write it: a file over its whiteout, and an opaque folder."""
    lower = [Item("d/a", b"old", mode=0o777), Item("d/e/x", b"old")]
    top = [Item("d/.wh.a"), Item("d/a", b"new", mode=0o600), folder("d/e", 0o700)]
    seen = view(tmp_path, lower, [*top, Item("d/e/.wh..wh..opq")])
    assert tree(seen) == {"/d": None, "/d/a": b"new", "/d/e": None}
    modes = [entry.row.mode for p in ("/d/a", "/d/e") if (entry := seen.stat(p))]
    assert modes == [0o600, 0o700]


def test_modes_come_from_the_tar_without_file_type_bits(tmp_path: Path) -> None:
    held = [Item("suid", mode=0o4755), Item("kind", mode=0o100640), folder("sticky", 0o41777),
            Item("none", mode=0)]  # fmt: skip
    seen = view(tmp_path, held)
    modes = {name: entry.row.mode for name in seen.names("/") if (entry := seen.stat(f"/{name}"))}
    assert modes == {"suid": 0o4755, "kind": 0o640, "sticky": 0o1777, "none": 0}


def test_layers_that_runtimes_read_differently_are_refused(tmp_path: Path) -> None:
    """One unpacks into /usr/lib, another puts a folder in the place of /lib."""
    seen = view(tmp_path, [Item("usr/lib/x"), symlink("lib", "usr/lib")], [Item("lib/y")])
    for path in ("/lib/y", "/usr/lib/x"):
        with pytest.raises(RemoteError, match="runtimes handle this differently"):
            seen.stat(path)


def test_devices_and_pipes_are_only_names(tmp_path: Path) -> None:
    kinds = (tarfile.BLKTYPE, tarfile.FIFOTYPE)
    seen = view(tmp_path, [Item(f"n{n}", type=kind) for n, kind in enumerate(kinds)])
    assert {seen.lstat(f"/n{n}").kind for n in range(2)} == {"other"}  # type: ignore[union-attr]
    assert seen.read("/n0") is None


# ------------------------------------------------------------- against an unpacking that is simple


class Disk:
    """Layers put one onto the other in a dict, as a runtime does on a disk."""

    def __init__(self) -> None:
        self.held: dict[str, object] = {}

    def apply(self, layer: list[Item]) -> None:
        for item in layer:  # whiteouts are about the layers below, wherever they stand
            parent, _, name = f"/{item.name}".rpartition("/")
            if name == ".wh..wh..opq":
                self.drop(f"{parent}/")
            elif name.startswith(".wh."):
                self.drop(f"{parent}/{name[4:]}", f"{parent}/{name[4:]}/")
        for item in layer:
            if ".wh." not in item.name:
                self.put(f"/{item.name}", None if item.type == tarfile.DIRTYPE else item.data)

    def drop(self, *starts: str) -> None:
        for name in [n for n in self.held if n == starts[0] or n.startswith(starts[-1])]:
            del self.held[name]

    def put(self, path: str, data: bytes | None) -> None:
        if data is not None or self.held.get(path, b"") is not None:
            self.drop(path, f"{path}/")
        self.held[path] = data


def unpack(layers: list[list[Item]]) -> dict[str, object]:
    """What the layers come to."""
    disk = Disk()
    for layer in layers:
        disk.apply(layer)
    return disk.held


def random_layer(dice: random.Random, number: int) -> list[Item]:
    """Few names, so that they meet; the folder of every file has an entry, as real layers have."""
    items: dict[str, Item] = {}
    for _ in range(dice.randrange(1, 9)):
        parts = [dice.choice("abc") for _ in range(dice.randrange(1, 5))]
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if items.setdefault(above, folder(above)).type != tarfile.DIRTYPE:
                break
        else:
            name = "/".join(parts)
            inside = any(other.startswith(f"{name}/") for other in items)
            if inside or dice.random() < 0.2:
                items[name] = folder(name)
            else:
                items[name] = Item(name, f"{number}{name}".encode())
    hides: dict[str, str] = {}
    for _ in range(dice.randrange(0, 3)):
        above = "/".join(dice.choice("abc") for _ in range(dice.randrange(0, 3)))
        target = f"{above}/{dice.choice('abc')}".strip("/")
        opaque = above and dice.random() < 0.5
        name = ".wh..wh..opq" if opaque else f".wh.{target[-1]}"
        parts = above.split("/") if above else []
        folders = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        if all(items.get(path, folder(path)).type == tarfile.DIRTYPE for path in folders):
            items.update({path: folder(path) for path in folders})
            hides[f"{above}/{name}".strip("/")] = "" if opaque else target
    hidden = [Item(name) for name, target in hides.items() if target not in items]
    made = [items[name] for name in sorted(items)]
    first = [item for item in made if item.type == tarfile.DIRTYPE]
    rest = [item for item in made if item.type != tarfile.DIRTYPE]
    return [*first, *rest, *hidden] if dice.random() < 0.5 else [*first, *hidden, *rest]


@pytest.mark.parametrize("seed", range(CASES * 12 // 5))
def test_random_layers_match_their_unpacked_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    if seed % 2:  # as layers that have too many entries to be held in memory
        monkeypatch.setattr(index, "_SMALL", 0)
    dice = random.Random(seed)
    layers = [random_layer(dice, number) for number in range(dice.randrange(1, 6))]
    wanted = unpack(layers)
    seen = view(tmp_path, *layers)
    assert tree(seen) == wanted
    for top in ("a", "a/b", "b"):
        inside = {p[len(top) + 2 :] for p in wanted if p.startswith(f"/{top}/")}
        assert seen.below(f"/{top}").keys() == inside


# ----------------------------------------------------------------------------- what is read, when


def test_layers_are_read_lazily_and_only_once(tmp_path: Path) -> None:
    layers = [
        [Item("a", b"1")],
        [Item("b", b"2")],
        [Item("c", b"3"), folder("d"), Item("d/.wh..wh..opq")],
    ]
    seen = view(tmp_path, *layers)
    assert seen.layers_read == 0
    assert seen.read("/c") is not None
    assert seen.names("/d") == []
    assert seen.layers_read == 1, "the top layer answered"
    assert seen.stat("/b") is not None
    assert seen.layers_read == 2
    assert seen.stat("/nothing") is None
    assert seen.layers_read == 3
    again = view(tmp_path, *layers)
    meter = again._cache.meter
    tree(again)
    assert meter.layers == []


def test_small_files_of_interest_are_kept_and_others_are_read_again(tmp_path: Path) -> None:
    site = "usr/lib/python3/dist-packages"
    seen = view(tmp_path, [Item(f"{site}/vllm/a.py", b"x = 1\n"), Item("etc/group", b"root")])
    meter = seen._cache.meter
    assert seen.read(f"/{site}/vllm/a.py") == b"x = 1\n"
    after_scan = meter.packed
    assert seen.read("/etc/group") == b"root"
    assert meter.packed > after_scan
    again = meter.packed
    assert seen.read("/etc/group") == b"root"
    assert meter.packed == again


def test_many_files_of_a_layer_are_fetched_in_one_pass(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item(f"data/{n}", bytes([n]) * 400) for n in range(50)])
    paths = [f"/data/{name}" for name in seen.names("/data")]
    before = seen._cache.meter.packed
    seen.fetch(paths)
    once = seen._cache.meter.packed - before
    assert [seen.read(f"/data/{n}") for n in range(50)] == [bytes([n]) * 400 for n in range(50)]
    assert seen._cache.meter.packed - before == once


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    seen = view(tmp_path, [Item("a", b"1")])
    assert seen.read("/a") == b"1"
    seen.close()
    (path,) = seen._cache._root.glob("*.sqlite")
    path.write_bytes(b"not a database" * 100)
    assert view(tmp_path, [Item("a", b"1")]).read("/a") == b"1"
    path.write_bytes(b"")
    with pytest.raises(Exception, match="version 0"):
        LayerIndex(path)
    assert view(tmp_path, [Item("a", b"1")]).read("/a") == b"1"


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    seen = view(tmp_path, [Item(f"d/{name}", b"1")])
    assert seen.names("/d") == [name]
    assert seen.read(f"/d/{name}") == b"1"
