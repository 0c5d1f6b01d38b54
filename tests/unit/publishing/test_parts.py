"""Parts of a large image: each more than the one before, valid in itself, and none too many."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import sha256_digest
from builder.publishing.distribute import parts_of
from builder.publishing.subject import Image, read_subject
from tests.unit.imagefiles import Item, put_image, tar_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """Five layers of two blocks of tar each, and more."""
    layers = [tar_of(Item(f"file-{n}", bytes([n]) * 20_000)) for n in range(5)]
    put_image(tmp_path, *layers, layer_type="application/vnd.oci.image.layer.v1.tar")
    source = LayoutDirectory(tmp_path)
    (found,) = read_subject(source, "").images
    return found


def ids_of(image: Image) -> tuple[str, ...]:
    assert image.settings.diff_ids is not None
    return image.settings.diff_ids


def counts(image: Image, present: set[str], limit: int) -> list[int]:
    """How many layers each part has."""
    found = []
    for part in parts_of(image, present, limit):
        document, config = part.manifest.json(), json.loads(part.config)
        assert document["config"]["digest"] == part.config_digest == sha256_digest(part.config)
        assert document["config"]["size"] == len(part.config)
        found.append(len(document["layers"]))
        assert document["layers"] == image.manifest.json()["layers"][: found[-1]]
        assert tuple(config["rootfs"]["diff_ids"]) == ids_of(image)[: found[-1]]
        assert config["architecture"] == image.settings.architecture
    return found


def test_parts(image: Image) -> None:
    size = image.layers[0].size
    ids = ids_of(image)
    assert counts(image, set(), size) == [1, 2, 3, 4]
    assert counts(image, set(), 2 * size) == [2, 4]
    assert counts(image, set(), 10 * size) == [], "a small image needs none"
    assert counts(image, set(ids), size) == [], "nothing is missing"
    assert counts(image, set(ids[:3]), size) == [4], "the last layer comes with the image"
    assert counts(image, {ids[1]}, 2 * size) == [3]


def test_the_same_image_has_the_same_parts(image: Image) -> None:
    once = [part.manifest.digest for part in parts_of(image, set(), 1)]
    assert once == [part.manifest.digest for part in parts_of(image, set(), 1)]
    assert len(set(once)) == len(once) == 4
