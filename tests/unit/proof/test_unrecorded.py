"""What nobody recorded: what Python runs at its start is found, everything else is listed."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest

from builder.cli.documents import schema
from builder.common.plan import Maker
from builder.common.reference import Ref
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    RawManifest,
)
from builder.images.rootfs.image import LayerCache, open_image
from builder.images.rootfs.view import Rootfs
from builder.proof import static
from tests.unit.fakes import dist_files, layer_text, record_line, vllm_files, write_tree
from tests.unit.imagefiles import (
    SITE,
    Item,
    diff_id,
    folder,
    packed,
    put,
    put_image,
    put_json,
    put_vllm,
    python_items,
    site_items,
    symlink,
    tar_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from builder.images.rootfs.index import Row
    from tests.unit.caller import Call

    Built = Callable[..., LayoutDirectory]

CODE = b"import os; os.system('id')\n"


@pytest.fixture(scope="module")
def images() -> dict[str, Path]:
    """A copy of each image that was built, by what its base holds."""
    return {}


@pytest.fixture
def built(call: Call, tmp_path: Path, folders: Path, images: dict[str, Path]) -> Built:
    """A layout with an image on a base with these files."""

    def build(*base: Item) -> LayoutDirectory:
        kept, out = images.get(repr(base)), tmp_path / "work" / "out"
        if kept is None:
            put_vllm(tmp_path / "base", items=base)
            words = ("-b", f"oci:{tmp_path}/base", "-o", "oci:out", "--no-verify")
            done = call("image", "-l", "fix", *words)
            assert done.code == 0, done.err
            images[repr(base)] = folders / f"unrecorded{len(images)}"
            shutil.copytree(out, images[repr(base)])
        else:
            shutil.copytree(kept, out)
        return LayoutDirectory(out)

    return build


def on_top(
    layout: LayoutDirectory, *items: Item, env: Sequence[str] = (), **settings: object
) -> None:
    """Somebody else's layer on the image, which keeps its configuration and thus its label."""
    manifest = layout.manifest("").json()
    blob = packed(tar_of(*items))
    config = json.loads((layout.path / layout.blob_path(manifest["config"]["digest"])).read_bytes())
    config["rootfs"]["diff_ids"].append(diff_id(blob))
    config["config"]["Env"] += env
    config["config"].update(settings)
    config["history"].append({"created_by": "somebody"})
    manifest["config"] = put_json(layout, config, OCI_CONFIG).as_json()
    manifest["layers"].append(put(layout, blob, OCI_LAYER_GZIP).as_json())
    (layout.path / "index.json").unlink()
    raw = RawManifest(data=json.dumps(manifest).encode(), media_type=OCI_MANIFEST)
    layout.put_manifest(raw, "")


def hooks(call: Any, *words: str) -> tuple[int, Any]:
    done = call("verify", *(words or ("oci:out",)), "--level", "static", "--json")
    (check,) = [c for c in done.json["checks"] if c["name"] == "startup hooks"]
    return done.code, check


def installed(name: str, path: str, data: bytes, site: str = SITE) -> list[Item]:
    files = dist_files(name, "1.0", {path: data})
    return [Item(f"{site}/{path}", data) for path, data in sorted(files.items())]


HOOKS = {
    "pth": [Item(f"{SITE}/evil.pth", b"# x\n" + CODE)],
    "pth-marked": [Item(f"{SITE}/evil.pth", b"\xef\xbb\xbfimport\tos\n")],
    "pth-form-feed": [Item(f"{SITE}/evil.pth", b"/x\x0cimport os\n")],
    "site": [Item(f"{SITE}/sitecustomize.py", CODE)],
    "user": [Item(f"{SITE}/usercustomize.py", CODE)],
    "package": [Item(f"{SITE}/sitecustomize/__init__.py", CODE)],
    "link": [symlink(f"{SITE}/sitecustomize", "vllm")],
    "linked": [Item("srv/x.txt", CODE), symlink(f"{SITE}/evil.pth", "/srv/x.txt")],
    "extension": [Item(f"{SITE}/sitecustomize.cpython-312-aarch64-linux-gnu.so", CODE)],
    "replaced": [Item(f"{SITE}/known.pth", CODE)],
    "settings": [Item(f"{SITE}/spark_build_env.pth", CODE)],
    "stdlib": [Item("opt/app/lib/python3.12/sitecustomize.py", CODE)],
    "debian": [Item("usr/lib/python3/dist-packages/evil.pth", CODE)],
}


#: A startup hook that its package records.
KNOWN = installed("known", "known.pth", b"import known\n")


def test_a_recorded_startup_hook(call: Call, built: Built) -> None:
    built(*KNOWN)
    assert hooks(call)[1]["status"] == "pass"


@pytest.mark.parametrize("items", HOOKS.values(), ids=list(HOOKS))
def test_an_unrecorded_startup_hook(call: Call, built: Built, items: Sequence[Item]) -> None:
    on_top(built(*KNOWN), *items)
    code, check = hooks(call)
    assert (code, check["status"]) == (5, "fail")
    path = f"/{items[-1].name}".removeprefix(f"/{SITE}/")
    assert check["where"] == path
    assert check["unrecorded"] == [path]
    assert path in check["seen"]


def test_the_layers_of_a_known_base_are_not_read_again(
    call: Call, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What level ``static`` reads of a base is stored when its layers are indexed."""
    script, info = b"#!/opt/app/bin/python3\n", "vllm-0.20.1.dist-info"
    rows = vllm_files()[f"{info}/RECORD"] + record_line("../../../bin/vllm", script).encode()
    built(
        *KNOWN,
        Item("opt/app/bin/vllm", script, mode=0o755),
        Item("etc/ld.so.preload", b"/usr/lib/libtcmalloc.so\n"),
        Item(f"{SITE}/{info}/RECORD", rows),
        Item(f"{SITE}/old-1.0.egg-info/entry_points.txt", b"[console_scripts]\nold = old:run\n"),
    )
    read: list[str] = []

    def fetch(_cache: LayerCache, _layer: object, wanted: Sequence[Row]) -> None:
        read.extend(row.path for row in wanted)

    monkeypatch.setattr(LayerCache, "fetch", fetch)
    hooks(call)
    assert read == []


def test_a_stray_module_is_listed(call: Call, built: Built) -> None:
    layout = built()
    assert "unrecorded" not in hooks(call)[1]
    on_top(
        layout,
        Item(f"{SITE}/stray.py", CODE),
        Item(f"{SITE}/vllm/stray.json", b"{}"),
        Item(f"{SITE}/other/a.py", CODE),
        Item(f"{SITE}/other/b/c.py", CODE),
        Item(f"{SITE}/paths.pth", b"/srv/more\n"),
        Item(f"{SITE}/vllm/__pycache__/core.cpython-312.pyc", b"x"),
        folder(f"{SITE}/empty"),
    )
    code, check = hooks(call)
    assert (code, check["status"]) == (0, "pass")
    assert check["unrecorded"] == ["other/", "paths.pth", "stray.py", "vllm/stray.json"]
    assert check["seen"] == "4 other files unrecorded: other/, paths.pth, stray.py, ..."


def failed(call: Any) -> dict[str, Any]:
    """The failed checks of level static, by name."""
    done = call("verify", "oci:out", "--level", "static", "--json")
    bad = {c["name"]: c for c in done.json["checks"] if c["status"] == "fail"}
    assert done.code == (5 if bad else 0)
    return bad


def compiled(flags: int, size: int, magic: bytes = b"\xcb\x0d\r\n") -> bytes:
    """A compiled file with the header of CPython 3.12."""
    return magic + flags.to_bytes(4, "little") + bytes(4) + size.to_bytes(4, "little") + b"code"


CORE, ENVS = f"{SITE}/vllm/core", f"{SITE}/vllm/envs"
NATIVE = "cpython-312-aarch64-linux-gnu.so"
TRIPLE = "cpython-312"
#: Files that Python runs instead of ``core.py``, which a layer patched, or ``envs.py``.
SHADOWS = {
    "package": ([Item(f"{CORE}/__init__.py", CODE)], "vllm/core/__init__.py"),
    "extension": ([Item(f"{CORE}.{NATIVE}", CODE)], f"vllm/core.{NATIVE}"),
    "abi3": ([Item(f"{CORE}.abi3.so", CODE)], "vllm/core.abi3.so"),
    "so": ([Item(f"{CORE}.so", CODE)], "vllm/core.so"),
    "compiled package": ([Item(f"{CORE}/__init__.pyc", CODE)], "vllm/core/__init__.pyc"),
    "linked package": (
        [Item("srv/x/__init__.py", CODE), symlink(CORE, "/srv/x")],
        "vllm/core/__init__.py",
    ),
    "unrelated": ([Item(f"{ENVS}/__init__.py", CODE)], "vllm/envs/__init__.py"),
    "of the package": ([Item(f"{SITE}/vllm/__init__.so", CODE)], "vllm/__init__.so"),
    "unchecked": (
        [Item(f"{SITE}/vllm/__pycache__/core.{TRIPLE}.pyc", compiled(1, 0))],
        f"vllm/__pycache__/core.{TRIPLE}.pyc",
    ),
    "checked": (
        [Item(f"{SITE}/vllm/__pycache__/envs.{TRIPLE}.pyc", compiled(3, 0))],
        f"vllm/__pycache__/envs.{TRIPLE}.pyc",
    ),
    "optimized": (
        [Item(f"{SITE}/vllm/__pycache__/core.{TRIPLE}.opt-1.pyc", compiled(1, 0))],
        f"vllm/__pycache__/core.{TRIPLE}.opt-1.pyc",
    ),
    "working folder": ([Item("vllm/__init__.py", CODE)], "/vllm/__init__.py"),
    "beside the command": (
        [
            Item("opt/app/bin/vllm", b"#!/opt/app/bin/python3", mode=0o755),
            Item("opt/app/bin/vllm.py", CODE),
        ],
        "/opt/app/bin/vllm.py",
    ),
    "standard library": (
        [Item("opt/app/lib/python3.12/vllm.py", CODE)],
        "/opt/app/lib/python3.12/vllm.py",
    ),
    "extension of the library": (
        [Item(f"opt/app/lib/python3.12/lib-dynload/vllm.{NATIVE}", CODE)],
        f"/opt/app/lib/python3.12/lib-dynload/vllm.{NATIVE}",
    ),
    "archive": ([Item("opt/app/lib/python312.zip", b"PK")], "/opt/app/lib/python312.zip"),
    "user's folder": (
        [Item("root/.local/lib/python3.12/site-packages/vllm/__init__.py", CODE)],
        "/root/.local/lib/python3.12/site-packages/vllm/__init__.py",
    ),
}


@pytest.mark.parametrize(("items", "path"), SHADOWS.values(), ids=list(SHADOWS))
def test_a_file_that_python_imports_instead_of_another(
    call: Call, built: Built, items: Sequence[Item], path: str
) -> None:
    layout = built()
    assert not failed(call)
    on_top(layout, *items)
    check = failed(call)["imported modules"]
    assert check["where"] == path
    assert check["reason"] == "the recorded file is there, but has no effect"


@pytest.mark.parametrize("item", [
    Item(f"{CORE}.cpython-311-aarch64-linux-gnu.so"),
    Item(f"{CORE}.cpython-312-x86_64-linux-gnu.so"),
    Item(f"{CORE}.pyd"),
    Item(f"{CORE}/data.json", b"{}"),
    Item(f"{SITE}/vllm/__pycache__/core.cpython-311.pyc", compiled(1, 0)),
    Item(f"{SITE}/vllm/__pycache__/core.{TRIPLE}.pyc", compiled(0, 1)),
    Item(f"{SITE}/vllm/__pycache__/core.{TRIPLE}.pyc", compiled(1, 0, b"\xcb\x0d\n\n")),
    Item("opt/app/lib/python3.12/vllm/data.json", b"{}"),
], ids=lambda item: item.name)  # fmt: skip
def test_a_file_that_this_python_does_not_import(call: Call, built: Built, item: Item) -> None:
    on_top(built(), item)
    assert not failed(call)


#: Code that layers above the base add to a package that a layer changed, or replace elsewhere.
LATER = {
    "module": ([Item(f"{SITE}/vllm/stray.py", CODE)], "vllm/stray.py"),
    "extension": ([Item(f"{SITE}/vllm/_C.abi3.so", CODE)], "vllm/_C.abi3.so"),
    "compiled": ([Item(f"{SITE}/vllm/stray.pyc", CODE)], "vllm/stray.pyc"),
    "linked": ([symlink(f"{SITE}/vllm/stray", "/srv")], "vllm/stray"),
    "of another package": ([Item(f"{SITE}/known.py", b"changed")], "known.py"),
}


@pytest.mark.parametrize(("items", "path"), LATER.values(), ids=list(LATER))
def test_code_that_a_later_layer_adds_or_replaces(
    call: Call, built: Built, items: Sequence[Item], path: str
) -> None:
    layout = built(*installed("known", "known.py", b"known"))
    assert not failed(call)
    on_top(layout, *items)
    assert failed(call)["files above the base"]["where"] == path


def test_a_copy_of_our_files_on_top_makes_nothing_the_base(call: Call, built: Built) -> None:
    layout = built()
    image = open_image(Ref("oci:out"))
    view = Rootfs(image.layers, LayerCache(image.source))
    plan = f"/{SHARE}/plan.json"
    receipt = f"/{SITE}/.spark-build/receipts/fix.json"
    again = [Item(path[1:], view.read(path) or b"") for path in (plan, receipt)]
    view.close()
    on_top(layout, Item(f"{SITE}/evil.pth", CODE), Item(f"{SITE}/vllm/stray.py", CODE))
    on_top(layout, *again)
    assert {"startup hooks", "files above the base"} <= failed(call).keys()


def record_of(layout: LayoutDirectory, path: str) -> bytes:
    """A file of the image's site-packages."""
    image = open_image(Ref(f"oci:{layout.path}"))
    view = Rootfs(image.layers, LayerCache(image.source))
    try:
        return view.read(f"/{SITE}/{path}") or b""
    finally:
        view.close()


@pytest.mark.parametrize("info", ["vllm-0.20.1.dist-info", "vllm-9.dist-info"])
def test_a_changed_file_with_a_changed_record(call: Call, built: Built, info: str) -> None:
    """RECORD is the image's own; so the layer that a file is from counts as well."""
    layout = built()
    record = record_of(layout, "vllm-0.20.1.dist-info/RECORD").decode()
    lines = [line for line in record.splitlines() if not line.startswith("vllm/envs.py,")]
    text = "\n".join([*lines, record_line("vllm/envs.py", CODE)])
    on_top(
        layout,
        Item(f"{SITE}/vllm/envs.py", CODE),
        Item(f"{SITE}/{info}/RECORD", text.encode()),
        Item(f"{SITE}/{info}/METADATA", f"Name: vllm\nVersion: {info[5:-10]}\n".encode()),
    )
    check = failed(call)["files above the base"]
    assert "vllm/envs.py" in check["seen"]


def test_a_shadow_in_a_package_that_no_layer_changes(call: Call, built: Built) -> None:
    known = installed("known", "known/a.py", b"known")
    layout = built(*known, Item(f"{SITE}/known/a/__init__.py", CODE))
    _, check = hooks(call)
    assert "known/a/" in check["unrecorded"]
    on_top(layout, Item(f"{SITE}/known/a.so", CODE))
    assert failed(call)["imported modules"]["where"] == "known/a/__init__.py"


PLUGIN = b"[vllm.general_plugins]\nx = evil:run\n"
#: What runs whenever the image's vLLM starts.
PROGRAMS = {
    "plugin": Item(f"{SITE}/evil-1.0.dist-info/entry_points.txt", PLUGIN),
    "plugin of an egg": Item(f"{SITE}/evil.egg-info/entry_points.txt", PLUGIN),
    "plugin elsewhere": Item("srv/evil-1.0.dist-info/entry_points.txt", PLUGIN),
    "damaged entry points": Item(f"{SITE}/evil-1.0.dist-info/entry_points.txt", b"[x"),
    "backend of torch": Item(
        f"{SITE}/evil-1.0.dist-info/entry_points.txt", b"[torch.backends]\nx=y:z\n"
    ),
    "command": Item("opt/app/bin/vllm", b"#!/bin/sh\nevil", mode=0o755),
    "interpreter": Item("opt/app/bin/python3.12", b"\x7fELF evil", mode=0o755),
    "link to it": symlink("opt/app/bin/python3", "other"),
    "environment": Item("opt/app/pyvenv.cfg", b"home = /srv\n"),
    "standard library": Item("opt/app/lib/python3.12/os.py", b"evil"),
    "module of it": Item("opt/app/lib/python3.12/json/__init__.py", CODE),
    "loader": Item("etc/ld.so.preload", b"/srv/evil.so\n"),
}


@pytest.mark.parametrize("item", PROGRAMS.values(), ids=list(PROGRAMS))
def test_what_runs_at_every_start(call: Call, built: Built, item: Item) -> None:
    layout = built(Item("opt/app/bin/vllm", b"#!/opt/app/bin/python3.12\n", mode=0o755))
    assert not failed(call)
    on_top(layout, item, Item("opt/app/bin/other", b"\x7fELF", mode=0o755))
    path = f"/{item.name}".removeprefix(f"/{SITE}/")
    assert path in failed(call)["startup hooks"]["unrecorded"]


SHARE = "usr/share/spark-build"
#: What spark-build wrote, changed later; and what its programs would import instead of each other.
OWN = {
    "verifier": Item(f"{SHARE}/spark_verify.pyz", b"print('all PASS')\n"),
    "applier": Item(f"{SHARE}/spark_apply.pyz", b"PK"),
    "data": Item(f"{SHARE}/device.json", b"{}\n"),
    "flags": Item(f"{SHARE}/serve-flags.json", b"{}\n"),
    "terms": Item(f"{SHARE}/LICENSE", b""),
    "list": Item(f"{SHARE}/files.json", b"{}\n"),
    "damaged list": Item(f"{SHARE}/files.json", b"{"),
    "removed list": Item(f"{SHARE}/.wh.files.json"),
    "removed": Item(f"{SHARE}/.wh.spark_verify.pyz"),
    "added module": Item(f"{SHARE}/json.py", CODE),
    "added code": Item(f"{SHARE}/__pycache__/verify_checks.cpython-312.pyc", b"x"),
    "link": symlink(f"{SHARE}/spark_verify.pyz", "/srv/x"),
    "command": Item("usr/local/bin/spark-verify", b"#!/bin/sh\ntrue\n", mode=0o755),
    "earlier command": Item("opt/app/bin/spark-verify", b"#!/bin/sh\ntrue\n", mode=0o755),
}


@pytest.mark.parametrize("item", OWN.values(), ids=list(OWN))
def test_what_spark_build_wrote(call: Call, built: Built, item: Item) -> None:
    layout = built()
    assert not failed(call)
    on_top(layout, item)
    assert failed(call)["files of spark-build"]["where"] == f"/{item.name}".replace(".wh.", "")


@pytest.mark.parametrize("change", [b"#!/bin/sh\ntrue\n", None])
def test_a_command_that_a_layer_brings(call: Call, tmp_path: Path, change: bytes | None) -> None:
    """Changed, or removed."""
    put_vllm(tmp_path / "base")
    text = layer_text('op = "copy"\nfrom = "points"\nto = "tool-1.0.dist-info/entry_points.txt"')
    points = b"[console_scripts]\ntool = vllm.core:main\n"
    write_tree(tmp_path / "mine", {"tool/layer.toml": text.encode(), "tool/points": points})
    words = ("-l", "tool", "--patches", tmp_path / "mine", "-b", f"oci:{tmp_path}/base")
    assert call("image", *words, "-o", "oci:out", "--no-verify").code == 0
    assert "files of spark-build" not in failed(call)
    tool = "usr/local/bin/tool"
    item = Item("usr/local/bin/.wh.tool") if change is None else Item(tool, change, mode=0o755)
    on_top(LayoutDirectory(tmp_path / "work" / "out"), item)
    assert failed(call)["files of spark-build"]["where"] == f"/{tool}"


def test_an_image_of_another_spark_build(
    call: Call, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own list of files has the digest that its plan states."""
    layout = built()
    monkeypatch.setattr(static, "maker", lambda: Maker(version="9", files="sha256:9"))
    assert not failed(call)
    on_top(layout, OWN["verifier"])
    assert failed(call)["files of spark-build"]["where"] == f"/{SHARE}/spark_verify.pyz"
    on_top(layout, Item(f"{SHARE}/.wh.files.json"))
    done = call("verify", "oci:out", "--level", "static", "--json")
    (check,) = [c for c in done.json["checks"] if c["name"] == "files of spark-build"]
    assert (done.code, check["status"]) == (5, "not-run")
    assert "wrote no list of its files" in check["reason"]


def test_the_interpreter_that_the_command_names(call: Call, built: Built) -> None:
    script = Item("opt/app/bin/vllm", b"#!/srv/python -s\n", mode=0o755)
    on_top(built(script), Item("srv/python", b"\x7fELF", mode=0o755))
    assert "/srv/python" in failed(call)["startup hooks"]["unrecorded"]


@pytest.mark.parametrize("name", ["PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX"])
def test_a_variable_that_leads_python_elsewhere(call: Call, built: Built, name: str) -> None:
    layout = built()
    on_top(layout, Item("srv/x", b""), env=[f"{name}=/srv"])
    assert f"${name}" in failed(call)["startup hooks"]["unrecorded"]


def test_entry_points_that_nothing_loads_are_listed(call: Call, built: Built) -> None:
    text = b"[console_scripts]\nx = y:z\n"
    on_top(built(), Item(f"{SITE}/good-1.0.dist-info/entry_points.txt", text))
    assert not failed(call)


def test_names_that_are_not_utf8(call: Call, built: Built) -> None:
    on_top(built(), Item(f"{SITE}/\udcff.pth", CODE))
    code, check = hooks(call)
    assert (code, check["unrecorded"]) == (5, ["\\xff.pth"])


def test_files_of_a_package_are_recorded(call: Call, built: Built) -> None:
    layout = built(*KNOWN)
    debian = "usr/lib/python3/dist-packages"
    on_top(
        layout,
        *installed("later", "sitecustomize.py", CODE),
        *installed("other", "other.pth", CODE, site=debian),
        Item(f"{debian}/packaged.pth", CODE),
        Item("etc/python3.12/sitecustomize.py", CODE),
        Item(
            "var/lib/dpkg/info/python3.list",
            f"/.\n/{debian}/packaged.pth\n/etc/python3.12/sitecustomize.py\n".encode(),
        ),
    )
    code, check = hooks(call)
    assert (code, check["status"], check["seen"]) == (0, "pass", "every file is recorded")


def test_a_hook_of_the_base_is_attributed_to_it(call: Call, built: Built) -> None:
    built(Item(f"{SITE}/theirs.pth", CODE))
    code, check = hooks(call)
    assert (code, check["status"]) == (0, "pass")
    assert check["seen"] == "in the base already: theirs.pth"
    assert check["unrecorded"] == ["theirs.pth"]
    jsonschema = pytest.importorskip("jsonschema")
    document = call("verify", "oci:out", "--level", "static", "--json").json
    jsonschema.validate(document, schema("verify"))


def test_a_foreign_image_has_no_known_base(call: Call, tmp_path: Path) -> None:
    made = (Item(f"{SITE}/_virtualenv.pth", b"import _virtualenv"),)
    put_vllm(tmp_path / "venv", items=[*made, Item(f"{SITE}/_virtualenv.py", b"")])
    put_vllm(tmp_path / "evil", items=[Item(f"{SITE}/evil.pth", CODE)])
    words = ("-l", "fix")
    assert hooks(call, f"oci:{tmp_path}/venv", *words)[1]["status"] == "pass"
    assert hooks(call, f"oci:{tmp_path}/evil", *words)[1]["status"] == "fail"


# ------------------------------------------------------------------------- starts of the image


VLLM = Item("opt/app/bin/vllm", b"#!/opt/app/bin/python3.12\n", mode=0o755)
OTHER = Item("usr/lib/python3.10/argparse.py", b"# of another version\n")
PASSWD = (
    b"daemon:x:1:1::/:/bin/sh\nroot:x:0:0:root:/srv/home:/bin/sh\napp:x:7:7::/srv/app:/bin/sh\n"
)
PACKAGE = "lib/python3.12/site-packages/vllm/__init__.py"
#: What a start of the image finds earlier on ``sys.path``, with variables and settings.
EARLIER: dict[str, tuple[list[Item], list[str], dict[str, object], str]] = {
    "user base": (
        [Item(f"srv/user/{PACKAGE}", CODE)],
        ["PYTHONUSERBASE=/srv/user"],
        {},
        f"/srv/user/{PACKAGE}",
    ),
    "home of root": (
        [Item("etc/passwd", PASSWD), Item(f"srv/home/.local/{PACKAGE}", CODE)],
        [],
        {},
        f"/srv/home/.local/{PACKAGE}",
    ),
    "home of the user": (
        [Item("etc/passwd", PASSWD), Item(f"srv/app/.local/{PACKAGE}", CODE)],
        [],
        {"User": "app:7"},
        f"/srv/app/.local/{PACKAGE}",
    ),
    "home of a number": (
        [Item("etc/passwd", PASSWD), Item(f"srv/app/.local/{PACKAGE}", CODE)],
        [],
        {"User": "7"},
        f"/srv/app/.local/{PACKAGE}",
    ),
    "folder that a .pth file of the user names": (
        [
            Item("root/.local/lib/python3.12/site-packages/more.pth", b"/srv/more\n"),
            Item("srv/more/vllm/__init__.py", CODE),
        ],
        [],
        {},
        "/srv/more/vllm/__init__.py",
    ),
    "module beside the command": (
        [Item("opt/app/bin/argparse.py", CODE)],
        [],
        {},
        "/opt/app/bin/argparse.py",
    ),
    "package beside the command": (
        [Item("opt/app/bin/re/__init__.py", CODE)],
        [],
        {},
        "/opt/app/bin/re/__init__.py",
    ),
    "linked package beside the command": (
        [symlink("opt/app/bin/re", "/usr/lib/python3.10")],
        [],
        {},
        "/opt/app/bin/re/__init__.py",
    ),
    "module beside the entrypoint": (
        [Item("srv/start", b"#!/bin/sh\n", mode=0o755), Item("srv/json.py", CODE)],
        [],
        {"Entrypoint": ["/srv/start"]},
        "/srv/json.py",
    ),
    "module beside a script": (
        [Item("srv/start.py", b""), Item("srv/json.py", CODE)],
        [],
        {"Entrypoint": ["python3", "-u", "/srv/start.py"]},
        "/srv/json.py",
    ),
    "working folder": ([Item("work/json.py", CODE)], [], {"WorkingDir": "/work"}, "/work/json.py"),
    "root": ([Item("argparse.py", CODE)], [], {}, "/argparse.py"),
    "root, compiled": ([Item("argparse.pyc", CODE)], [], {}, "/argparse.pyc"),
    "variable": ([Item("srv/types.py", CODE)], ["PYTHONPATH=/x:/srv"], {}, "/srv/types.py"),
    "relative variable": (
        [Item("work/in/types.py", CODE)],
        ["PYTHONPATH=in"],
        {"WorkingDir": "/work"},
        "/work/in/types.py",
    ),
    "variable to a folder of the base": (
        [],
        ["PYTHONPATH=/usr/lib/python3.10"],
        {},
        "/usr/lib/python3.10/argparse.py",
    ),
    "working folder of the base": (
        [],
        [],
        {"WorkingDir": "/usr/lib/python3.10"},
        "/usr/lib/python3.10/argparse.py",
    ),
    "the packages before the library": (
        [Item(f"{SITE}/argparse.py", CODE)],
        [f"PYTHONPATH=/{SITE}"],
        {},
        f"/{SITE}/argparse.py",
    ),
    "archive": ([Item("srv/x.egg", b"PK")], ["PYTHONPATH=/srv/x.egg"], {}, "/srv/x.egg"),
    "another recorded module": (
        [Item("opt/app/bin/known.py", CODE)],
        [],
        {},
        "/opt/app/bin/known.py",
    ),
}
BASE = (
    VLLM,
    OTHER,
    Item("usr/lib/python3.10/__init__.py", b""),
    *installed("known", "known.py", b"known"),
)


@pytest.mark.parametrize(("items", "env", "settings", "path"), EARLIER.values(), ids=list(EARLIER))
def test_a_file_earlier_on_the_search_path_of_a_start(
    call: Call,
    built: Built,
    items: Sequence[Item],
    env: Sequence[str],
    settings: dict[str, Any],
    path: str,
) -> None:
    layout = built(*BASE)
    assert not failed(call)
    on_top(layout, *items, Item("srv/x", b""), env=env, **settings)
    assert path in failed(call)["imported modules"]["seen"]


@pytest.mark.parametrize(("items", "env", "settings"), [
    ([Item("json.py", CODE)], ["PYTHONSAFEPATH=1"], {"Entrypoint": ["python3", "-m", "vllm"]}),
    ([Item(f"root/.local/{PACKAGE}", CODE)], ["PYTHONNOUSERSITE=1"], {}),
    ([Item(f"root/.local/{PACKAGE}", CODE), Item("etc/passwd", PASSWD)], [], {}),
    ([Item("work/test/data.txt", b""), Item("work/json/x.txt")], [], {"WorkingDir": "/work"}),
    ([Item("opt/app/bin/argparse.txt", CODE)], [], {}),
    ([Item("opt/app/bin/nothing.py", CODE)], [], {}),
    ([Item("srv/types.py", CODE)], ["PYTHONPATH="], {}),
    ([Item(f"{SITE}/argparse.py", CODE)], [], {}),
    ([Item("srv/x.txt")], [f"PYTHONPATH=/{SITE}:/opt/app/lib/python3.12"], {}),
    ([Item("srv/lib/python3.11/site-packages/vllm/__init__.py")], ["PYTHONUSERBASE=/srv"], {}),
], ids=["safe path", "no user site", "another home", "namespaces", "no module", "no other module",
        "empty variable", "the library first", "packages and library",
        "another version"])  # fmt: skip
def test_a_file_that_no_start_imports(
    call: Call, built: Built, items: Sequence[Item], env: Sequence[str], settings: dict[str, Any]
) -> None:
    on_top(built(*BASE), *items, env=env, **settings)
    assert not failed(call)


def test_a_module_beside_the_command_that_the_base_has(call: Call, built: Built) -> None:
    layout = built(VLLM, Item("opt/app/bin/argparse.py", b"# of the base\n"))
    code, check = hooks(call)
    assert (code, check["unrecorded"]) == (0, ["/opt/app/bin/argparse.py"])
    assert check["seen"] == "in the base already: /opt/app/bin/argparse.py"
    on_top(layout, Item("opt/app/bin/argparse.py", CODE))
    assert failed(call)["imported modules"]["where"] == "/opt/app/bin/argparse.py"


#: What makes Python take another standard library, or run a module of its own at startup.
LED = {
    "not installed": (
        [Item("opt/app/bin/pybuilddir.txt", b"x")],
        [],
        "/opt/app/bin/pybuilddir.txt",
    ),
    "sources": ([Item("opt/app/bin/Modules/Setup.local")], [], "/opt/app/bin/Modules/Setup.local"),
    "nearer library": (
        [Item("opt/app/bin/lib/python3.12/os.py", CODE)],
        [],
        "/opt/app/bin/lib/python3.12 (instead of /opt/app/lib/python3.12)",
    ),
    "module of the base": (
        [],
        ["PYTHONPATH=/usr/share/doc"],
        "/usr/share/doc/sitecustomize.py",
    ),
}


@pytest.mark.parametrize(("items", "env", "path"), LED.values(), ids=list(LED))
def test_what_leads_python_elsewhere(
    call: Call, built: Built, items: Sequence[Item], env: Sequence[str], path: str
) -> None:
    layout = built(VLLM, Item("usr/share/doc/sitecustomize.py", CODE))
    assert not failed(call)
    on_top(layout, *items, Item("srv/x", b""), env=env)
    assert path in failed(call)["startup hooks"]["unrecorded"]


def test_a_start_that_does_not_search_the_packages(call: Call, built: Built) -> None:
    layout = built(VLLM)
    on_top(layout, Item("srv/x"), Entrypoint=["python3", "-S", "/opt/app/bin/vllm"])
    seen = failed(call)["startup hooks"]["unrecorded"]
    assert seen == [f"python3 (it does not search /{SITE})"]


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_LIBRARY_PATH"])
def test_a_list_of_folders_that_nobody_has(call: Call, built: Built, name: str) -> None:
    on_top(built(), Item("srv/x"), env=[f"{name}={':/x' * 70_000}"])
    done = call("verify", "oci:out", "--level", "static")
    assert (done.code, f"${name} of the image has 70001 parts" in done.err) == (2, True)


@pytest.mark.parametrize("path", ["etc/passwd", "etc/ld.so.cache", "etc/ld.so.conf.d/x.conf"])
def test_settings_larger_than_any(call: Call, built: Built, path: str) -> None:
    on_top(built(), Item(path, bytes(3 << 20)))
    done = call("verify", "oci:out", "--level", "static")
    assert (done.code, f"/{path} of the image has 3145728 bytes" in done.err) == (2, True)


@pytest.mark.parametrize(("item", "reason"), [
    (Item("opt/app/bin/pybuilddir.txt", b"x" * 40_000), "larger than 32 KiB"),
    (Item("root/.local/lib/python3.12/site-packages/a.pth", b"/x\n" * 40_000), "120000 bytes"),
], ids=["pybuilddir.txt", "pth"])  # fmt: skip
def test_files_that_no_start_reads(call: Call, built: Built, item: Item, reason: str) -> None:
    on_top(built(VLLM), item)
    seen = failed(call)["startup hooks"]["seen"]
    assert "(Python cannot start: " in seen
    assert reason in seen


def test_compiled_files_of_the_standard_library(call: Call, built: Built) -> None:
    """Any start of Python may have left some; those without a check of the source fail."""
    layout = built(Item("opt/app/lib/python3.12/argparse.py", b"# argparse\n"))
    cache = "opt/app/lib/python3.12/__pycache__"
    on_top(layout, Item(f"{cache}/argparse.{TRIPLE}.pyc", compiled(0, 11)))
    code, check = hooks(call)
    assert (code, check["unrecorded"]) == (0, [f"/{cache}/"])
    on_top(layout, Item(f"{cache}/argparse.{TRIPLE}.pyc", compiled(1, 0)))
    code, check = hooks(call)
    assert (code, check["unrecorded"]) == (5, [f"/{cache}/argparse.{TRIPLE}.pyc"])


def test_an_unchecked_file_of_a_package_that_no_layer_changes(call: Call, built: Built) -> None:
    layout = built(*installed("known", "known.py", b"known"))
    path = f"__pycache__/known.{TRIPLE}.pyc"
    on_top(layout, Item(f"{SITE}/{path}", compiled(0, 5)))
    code, check = hooks(call)
    assert (code, check["unrecorded"]) == (0, ["__pycache__/"])
    on_top(layout, Item(f"{SITE}/{path}", compiled(1, 0)))
    assert failed(call)["imported modules"]["where"] == path


@pytest.mark.parametrize("script", [
    b"#!/usr/bin/env python3\n",
    b"#!/usr/bin/env -S python3.12 -s\n",
    b"#!/bin/sh\n'''exec' /opt/app/bin/python3.12 \"$0\" \"$@\"\n' '''\n",
    b"#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python3' \"$0\" \"$@\"\n",
    b"\x7fELF",
])  # fmt: skip
def test_commands_in_other_forms(call: Call, built: Built, script: bytes) -> None:
    layout = built(Item("opt/app/bin/vllm", script, mode=0o755))
    assert not failed(call)
    on_top(layout, Item("opt/app/bin/argparse.py", CODE))
    assert failed(call)["imported modules"]["where"] == "/opt/app/bin/argparse.py"


LIBS = "usr/lib/aarch64-linux-gnu"
UV = "root/.local/share/uv/python/cpython-3.12.11-linux-aarch64-gnu"
DEBIAN = b"# Debian: lib/python3/dist-packages\n"
NVIDIA = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
#: Images as their makers lay them out: files, the folder of packages, and the configuration.
LAYOUTS: dict[str, tuple[list[Item], str, dict[str, object]]] = {
    "Ubuntu": (
        [
            *(
                item
                for item in python_items("usr")
                if not item.name.endswith(("site.py", "python3"))
            ),
            Item("usr/lib/python3.12/site.py", DEBIAN),
            symlink("bin", "usr/bin"),
            symlink("lib", "usr/lib"),
            symlink("usr/bin/python3", "/etc/alternatives/python3"),
            symlink("etc/alternatives/python3", "/usr/bin/python3.12"),
            Item("usr/lib/python3.12/argparse.py"),
            Item("usr/lib/python3.12/lib-dynload/_json.so"),
            Item("usr/lib/python3/dist-packages/six.py"),
            Item("usr/lib/python3.10/argparse.py"),
            Item(f"{LIBS}/libc.so.6"),
            Item(f"{LIBS}/libpython3.12.so.1.0"),
            Item("usr/local/cuda/compat/libcuda.so.1"),
            Item("etc/ld.so.cache", b"of the base"),
            Item("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n"),
            Item("usr/local/bin/vllm", b"#!/usr/bin/python3\n", mode=0o755),
            Item("vllm-workspace/examples/a.py"),
            Item("vllm-workspace/collect_env.py"),
        ],
        "usr/local/lib/python3.12/dist-packages",
        {
            "Env": [f"LD_LIBRARY_PATH={NVIDIA}:/usr/local/cuda/compat"],
            "WorkingDir": "/vllm-workspace",
            "Entrypoint": ["vllm", "serve"],
        },
    ),
    "NVIDIA": (
        [
            *python_items("usr"),
            Item("usr/lib/python3.12/site.py", DEBIAN),
            Item("opt/nvidia/nvidia_entrypoint.sh", b"#!/bin/bash\n", mode=0o755),
            Item("usr/local/bin/vllm", b"#!/usr/bin/python3.12\n", mode=0o755),
            Item("root/.cache/flashinfer/0.6/x.so", b"built before"),
        ],
        "usr/local/lib/python3.12/dist-packages",
        {"Entrypoint": ["/opt/nvidia/nvidia_entrypoint.sh"], "WorkingDir": "/workspace"},
    ),
    "virtual environment of uv": (
        [
            *python_items(UV),
            Item(f"{UV}/lib/libpython3.12.so.1.0"),
            symlink("opt/venv/bin/python", f"/{UV}/bin/python3.12"),
            symlink("opt/venv/bin/python3", "python"),
            Item("opt/venv/pyvenv.cfg", f"home = /{UV}/bin\nversion_info = 3.12.11\n".encode()),
            Item("opt/venv/bin/vllm", b"#!/opt/venv/bin/python3\n", mode=0o755),
        ],
        "opt/venv/lib/python3.12/site-packages",
        {
            "Env": ["PATH=/opt/venv/bin:/usr/bin", "VIRTUAL_ENV=/opt/venv"],
            "Cmd": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
            "User": "2000:0",
        },
    ),
    "python": (
        [
            *python_items("usr/local"),
            Item("usr/local/lib/libpython3.12.so.1.0"),
            Item("usr/local/bin/vllm", b"#!/usr/local/bin/python3.12\n", mode=0o755),
        ],
        "usr/local/lib/python3.12/site-packages",
        {"Entrypoint": ["/bin/sh", "-c", "vllm serve"], "Env": ["LD_LIBRARY_PATH=/usr/local/lib"]},
    ),
    "conda": (
        [
            *python_items("opt/conda"),
            Item("opt/conda/lib/libpython3.12.so.1.0"),
            Item("opt/conda/bin/vllm", b"#!/opt/conda/bin/python\n", mode=0o755),
            symlink("opt/conda/bin/python", "python3.12"),
        ],
        "opt/conda/lib/python3.12/site-packages",
        {"Env": ["PATH=/opt/conda/bin:/usr/bin", "LD_LIBRARY_PATH=/opt/conda/lib"]},
    ),
}


@pytest.mark.parametrize(("items", "site", "config"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_images_as_their_makers_lay_them_out(
    call: Call, tmp_path: Path, items: Sequence[Item], site: str, config: dict[str, Any]
) -> None:
    layer = packed(tar_of(*{item.name: item for item in items}.values(), *site_items(site=site)))
    put_image(tmp_path / "base", layer, config=config)
    words = ("-b", f"oci:{tmp_path}/base", "-o", "oci:out", "--no-verify")
    assert call("image", "-l", "fix", *words).code == 0
    assert not failed(call)
    on_top(LayoutDirectory(tmp_path / "work" / "out"), Item("root/.local/x", b""))
    assert not failed(call)


# ------------------------------------------------------------------- libraries and compiled code


def loader_cache(**places: str) -> bytes:
    """An ``ld.so.cache`` as ldconfig writes it."""
    texts, head = b"", struct.pack("<20sII", b"glibc-ld.so.cache1.1", len(places), 0) + bytes(20)
    entries, start = b"", len(head) + 24 * len(places)
    for name, path in places.items():
        key, value = name.replace("_", ".").encode() + b"\0", path.encode() + b"\0"
        where = start + len(texts)
        entries += struct.pack("<iIIIQ", 3, where, where + len(key), 0, 0)
        texts += key + value
    return head + entries + texts


NEAR = "LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/srv/lib"
#: Libraries and compiled code that these layers, or a variable, put first.
LOADED = {
    "libc": ([Item("srv/lib/libc.so.6", CODE)], [NEAR], "/srv/lib/libc.so.6"),
    "libpython": (
        [Item("srv/lib/libpython3.12.so.1.0", CODE)],
        [NEAR],
        "/srv/lib/libpython3.12.so.1.0",
    ),
    "variant": (
        [Item("srv/lib/glibc-hwcaps/x/libm.so.6", CODE)],
        [NEAR],
        "/srv/lib/glibc-hwcaps/x/libm.so.6",
    ),
    "linked folder": (
        [symlink("srv/lib", "/srv/other"), Item("srv/other/libc.so.6", CODE)],
        [NEAR],
        "/srv/lib/libc.so.6",
    ),
    "library of the system": ([Item("srv/lib/libssl.so.3", CODE)], [NEAR], "/srv/lib/libssl.so.3"),
    "library of a package": (
        [Item("srv/lib/libnccl.so.2", CODE)],
        [NEAR],
        "/srv/lib/libnccl.so.2",
    ),
    "driver": ([Item("srv/lib/libcuda.so.1", CODE)], [NEAR], "/srv/lib/libcuda.so.1"),
    "the base's libc elsewhere": ([], ["LD_LIBRARY_PATH=/opt/old"], "/opt/old/libc.so.6"),
    "working folder": ([Item("libc.so.6", CODE)], ["LD_LIBRARY_PATH=/x:"], "/libc.so.6"),
    "token": ([], ["LD_LIBRARY_PATH=$ORIGIN/../x"], "$LD_LIBRARY_PATH"),
    "setting": (
        [Item("etc/ld.so.conf.d/x.conf", b"# x\n/srv/lib\n"), Item("srv/lib/libc.so.6", CODE)],
        [],
        "/srv/lib/libc.so.6",
    ),
    "cache": (
        [
            Item("etc/ld.so.cache", loader_cache(libc_so_6="/srv/lib/x.so")),
            Item("srv/lib/x.so", CODE),
        ],
        [],
        "/etc/ld.so.cache",
    ),
    "cache to a library of the system": (
        [
            Item("etc/ld.so.cache", loader_cache(libssl_so_3="/srv/lib/x.so")),
            Item("srv/lib/x.so", CODE),
        ],
        [],
        "/etc/ld.so.cache",
    ),
    "damaged cache": ([Item("etc/ld.so.cache", b"?")], [], "/etc/ld.so.cache"),
    "replaced": ([Item(f"{LIBS}/libc.so.6", CODE)], [], f"/{LIBS}/libc.so.6"),
    "replaced loader": (
        [Item("usr/lib/ld-linux-aarch64.so.1", CODE)],
        [],
        "/usr/lib/ld-linux-aarch64.so.1",
    ),
    "replaced libpython": (
        [Item("opt/app/lib/libpython3.12.so.1.0", CODE)],
        [],
        "/opt/app/lib/libpython3.12.so.1.0",
    ),
    "name service": ([Item(f"{LIBS}/libnss_x.so.2", CODE)], [], f"/{LIBS}/libnss_x.so.2"),
    "replaced other": ([Item(f"{LIBS}/libssl.so.3", CODE)], [], f"/{LIBS}/libssl.so.3"),
    "preloaded": ([Item("usr/lib/x.so", CODE)], ["LD_PRELOAD=x.so"], "/usr/lib/x.so"),
    "audited": ([Item("srv/lib/x.so", CODE)], [NEAR, "LD_AUDIT=x.so"], "/srv/lib/x.so"),
    "preloaded from here": ([Item("x.so", CODE)], ["LD_PRELOAD=./x.so"], "$LD_PRELOAD"),
    "plugin of NCCL": ([Item(f"{LIBS}/libnccl-net.so", CODE)], [], f"/{LIBS}/libnccl-net.so"),
    "nccl by name": (
        [Item(f"{LIBS}/libown.so", CODE)],
        ["VLLM_NCCL_SO_PATH=libown.so"],
        "$VLLM_NCCL_SO_PATH",
    ),
    "folder of cubins": (
        [Item("srv/cubins/x.cubin", CODE)],
        ["FLASHINFER_CUBIN_DIR=/srv/cubins"],
        "$FLASHINFER_CUBIN_DIR",
    ),
    "nccl": ([Item("srv/n.so", CODE)], ["VLLM_NCCL_SO_PATH=/srv/n.so"], "$VLLM_NCCL_SO_PATH"),
    "logging": (
        [Item("srv/log.json", b"{}")],
        ["VLLM_LOGGING_CONFIG_PATH=/srv/log.json"],
        "$VLLM_LOGGING_CONFIG_PATH",
    ),
    "flashinfer": (
        [Item("root/.cache/flashinfer/0.6/121a/cached_ops/x/x.so", CODE)],
        [],
        "/root/.cache/flashinfer/",
    ),
    "flashinfer elsewhere": (
        [Item("srv/.cache/flashinfer/x.so", CODE)],
        ["FLASHINFER_WORKSPACE_BASE=/srv"],
        "/srv/.cache/flashinfer/",
    ),
    "inductor": ([Item("tmp/torchinductor_root/a/b.py", CODE)], [], "/tmp/torchinductor_root/"),
    "triton": ([Item("root/.triton/cache/x/k.cubin", CODE)], [], "/root/.triton/cache/"),
    "vllm": ([Item("srv/torch_compile_cache/a", CODE)], ["VLLM_CACHE_ROOT=/srv"], "/srv/"),
    "home of the user": (
        [Item("etc/passwd", PASSWD), Item("srv/home/.cache/vllm/x.so", CODE)],
        [],
        "/srv/home/.cache/vllm/",
    ),
    "linked cache": ([symlink("root/.cache/vllm", "/opt/old")], [], "/root/.cache/vllm/"),
}
#: A base with libraries, as NVIDIA's: some in a folder that LD_LIBRARY_PATH names.
LIBRARIES = (
    VLLM,
    Item(f"{LIBS}/libc.so.6", b"libc"),
    Item(f"{LIBS}/libssl.so.3", b"libssl"),
    Item("usr/local/nvidia/lib64/libcudart.so.12", b"cudart"),
    Item("opt/old/libc.so.6", b"old"),
    Item("root/.cache/readme.txt", b""),
    *installed("nccl", "nvidia/nccl/lib/libnccl.so.2", b"nccl"),
)


@pytest.mark.parametrize(("items", "env", "path"), LOADED.values(), ids=list(LOADED))
def test_libraries_and_compiled_code_that_come_first(
    call: Call, built: Built, items: Sequence[Item], env: Sequence[str], path: str
) -> None:
    layout = built(*LIBRARIES)
    assert not failed(call)
    on_top(layout, *items, Item("srv/x", b""), env=env)
    assert path in failed(call)["startup hooks"]["unrecorded"]


LIST = "var/lib/dpkg/info/libc6:arm64.list"


@pytest.mark.parametrize(("items", "env"), [
    ([], ["LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/missing"]),
    ([], [f"LD_LIBRARY_PATH=/{LIBS}"]),
    ([Item("srv/lib/libown.so.1", CODE)], [NEAR]),
    ([Item(f"{LIBS}/libnew.so.1", CODE)], []),
    ([Item(f"{LIBS}/libcuda.so.1"), Item(f"{LIBS}/libnvidia-ml.so.1")], []),
    ([Item(f"{LIBS}/libc.so.6", b"new"), Item(LIST, b"/lib/aarch64-linux-gnu/libc.so.6\n")], []),
    ([Item("etc/ld.so.cache", loader_cache(libc_so_6=f"/{LIBS}/libc.so.6"))], []),
    ([Item("etc/ld.so.conf.d/x.conf", b"/srv/lib\n"), Item("srv/lib/libown.so.1")], []),
    ([Item("root/.cache/vllm/modelinfos/x.json", b"{}"), Item("root/.cache/pip/x.so")], []),
    ([], [f"VLLM_NCCL_SO_PATH=/{SITE}/nvidia/nccl/lib/libnccl.so.2", "VLLM_CACHE_ROOT=/x"]),
], ids=["nvidia", "system", "own", "new", "left by a build", "upgraded", "same cache", "setting",
        "no code", "recorded"])  # fmt: skip
def test_libraries_that_hide_nothing(
    call: Call, built: Built, items: Sequence[Item], env: Sequence[str]
) -> None:
    on_top(built(*LIBRARIES), *items, Item("srv/x", b""), env=env)
    assert not failed(call)


def test_compiled_code_of_the_base_is_attributed_to_it(call: Call, built: Built) -> None:
    built(Item("root/.cache/flashinfer/0.6/x.so", b"of the base"))
    code, check = hooks(call)
    assert (code, check["status"]) == (0, "pass")
    assert check["seen"] == "in the base already: /root/.cache/flashinfer/"
