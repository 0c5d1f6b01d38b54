"""Documents of a layout that runtimes refuse, or read as something else: refused, one by one.

``tests/engine/test_layouts.py`` holds random ones against umoci and skopeo.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.reference import Ref
from builder.errors import SparkBuildError
from builder.images.registry.model import OCI_INDEX, OCI_MANIFEST
from builder.images.rootfs.image import LayerCache, open_image
from builder.images.rootfs.view import Rootfs
from tests.unit import layoutcases

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DICE = random.Random(20_261_123)


def read(root: Path) -> list[str]:
    """The names in the image of a layout."""
    image = open_image(Ref(f"oci:{root}:{layoutcases.NAME}"))
    view = Rootfs(image.layers, LayerCache(image.source, diff_ids=image.diff_ids))
    try:
        return view.names("/")
    finally:
        view.close()
        image.close()


def test_the_layout_that_the_cases_change(tmp_path: Path) -> None:
    layoutcases.write_case(tmp_path / "x", layoutcases.plain(), DICE)
    assert read(tmp_path / "x") == ["a", "b"]


def at(document: str, *path: Any, value: Any) -> Callable[[layoutcases.Case], None]:
    """Set a field of a document."""

    def change(case: layoutcases.Case) -> None:
        where = getattr(case, document)
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value

    return change


def raw(document: str, how: str) -> Callable[[layoutcases.Case], None]:
    """Write a document in another way."""

    def change(case: layoutcases.Case) -> None:
        case.raw[document] = how

    return change


RULES: dict[str, tuple[Callable[[layoutcases.Case], None], str]] = {
    "html": (at("manifest", "layers", 0, "mediaType", value="text/html"), "no runtime unpacks"),
    "type is a list": (at("manifest", "layers", 0, "mediaType", value=[]), "is not a text"),
    "no type": (at("manifest", "layers", 0, "mediaType", value=None), "no runtime unpacks"),
    "encrypted": (
        at("manifest", "layers", 0, "mediaType",
           value="application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
        "no runtime unpacks",
    ),
    "other compression": (
        at("manifest", "layers", 0, "mediaType", value="application/vnd.oci.image.layer.v1.tar"),
        "is packed as gzip, but its type",
    ),
    "root file system": (at("config", "rootfs", "type", value="x"), "rootfs.type .* is not 'lay"),
    "no type of it": (at("config", "rootfs", "type", value=None), "no rootfs.type 'layers'"),
    "windows": (at("config", "os", value="windows"), "is for 'windows', not for Linux"),
    "junk in the index": (at("index", "annotations", value=["x"]), "is not an object of texts"),
    "junk in its entry": (at("index", "manifests", 0, "urls", value=1), "not a list of texts"),
    "junk in a platform": (
        at("index", "manifests", 0, "platform", value={"os.features": "x"}), "not a list of texts"
    ),
    "type of the entry": (
        at("index", "manifests", 0, "mediaType", value=OCI_INDEX),
        "with type .* but it is of type",
    ),
    "size of the entry": (at("index", "manifests", 0, "size", value=1), "and 1 bytes, but it is"),
    "version of the index": (at("index", "schemaVersion", value=1), "schemaVersion is not 2"),
    "version of the manifest": (at("manifest", "schemaVersion", value=True), "is not 2"),
    "version of the layout": (at("marker", "imageLayoutVersion", value="2"), "version 1.0.0"),
    "subject": (at("manifest", "subject", value={}), "is not a sha256 digest"),
    "data": (at("manifest", "config", "data", value="%"), "is not base64"),
    "another case": (at("manifest", "Layers", value=[]), "Layers is layers for runtimes"),
    "another s": (at("manifest", "layer\u017f", value=[]), "is layers for runtimes"),
    "settings in another case": (
        at("config", "config", "ENTRYPOINT", value=["x"]), "is config.Entrypoint for runtimes"
    ),
    "half a letter": (at("config", "config", "User", value="\ud800"), "User .* is not a text"),
    "byte order mark": (raw("manifest", "bom"), "is not JSON"),
    "utf-16": (raw("config", "utf-16"), "is not JSON"),
    "not a number": (raw("index", "nan"), "has no list of manifests"),
    "a name twice": (raw("manifest", "twice"), "twice"),
    "no marker": (lambda case: setattr(case, "files", "no marker"), "does not state version"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), RULES.values(), ids=list(RULES))
def test_a_layout_that_runtimes_refuse(
    tmp_path: Path, change: Callable[[layoutcases.Case], None], said: str
) -> None:
    case = layoutcases.plain()
    change(case)
    layoutcases.write_case(tmp_path / "x", case, DICE)
    with pytest.raises(SparkBuildError, match=said):
        read(tmp_path / "x")


def test_random_layouts_are_read_or_refused(tmp_path: Path) -> None:
    """None ends in an error of ours."""
    accepted = 0
    for number in range(400):
        dice = random.Random(f"{OCI_MANIFEST} {number}")
        root = tmp_path / str(number)
        layoutcases.write_case(root, layoutcases.random_case(dice), dice)
        try:
            accepted += read(root) is not None
        except SparkBuildError:
            continue
    assert 40 < accepted < 360
