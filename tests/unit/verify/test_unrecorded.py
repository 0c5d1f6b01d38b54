"""What nobody recorded: what Python runs at its start is found, everything else is listed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from builder.cli.documents import schema
from builder.registry.layout import LayoutDirectory
from builder.registry.model import (
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    RawManifest,
)
from tests.unit.fakes import dist_files
from tests.unit.images import (
    SITE,
    Item,
    diff_id,
    folder,
    packed,
    put,
    put_json,
    put_vllm,
    symlink,
    tar_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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


def on_top(layout: LayoutDirectory, *items: Item) -> None:
    """Somebody else's layer on the image, which keeps its configuration and thus its label."""
    manifest = layout.manifest("").json()
    blob = packed(tar_of(*items))
    config = json.loads((layout.path / layout.blob_path(manifest["config"]["digest"])).read_bytes())
    config["rootfs"]["diff_ids"].append(diff_id(blob))
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


def test_a_stray_module_is_listed(call: Call, built: Built) -> None:
    layout = built()
    assert "unrecorded" not in hooks(call)[1]
    on_top(
        layout,
        Item(f"{SITE}/stray.py", CODE),
        Item(f"{SITE}/vllm/stray.py", CODE),
        Item(f"{SITE}/other/a.py", CODE),
        Item(f"{SITE}/other/b/c.py", CODE),
        Item(f"{SITE}/paths.pth", b"/srv/more\n"),
        Item(f"{SITE}/vllm/__pycache__/core.cpython-312.pyc", b"x"),
        folder(f"{SITE}/empty"),
    )
    code, check = hooks(call)
    assert (code, check["status"]) == (0, "pass")
    assert check["unrecorded"] == ["other/", "paths.pth", "stray.py", "vllm/stray.py"]
    assert check["seen"] == "4 other files unrecorded: other/, paths.pth, stray.py, ..."


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
