"""``publish --mirror-base`` copies the base that an image stands on, and no other image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.errors import UsageError
from builder.images.registry.layout import LayoutDirectory
from builder.publishing.run import base_of
from builder.publishing.subject import ImageSet, read_subject
from tests.unit.imagefiles import Item, put_image, tar_of

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = "application/vnd.oci.image.layer.v1.tar"


def image_of(folder: Path, names: str, kind: str = PLAIN) -> ImageSet:
    put_image(folder, *(tar_of(Item(name, b"x")) for name in names), layer_type=kind)
    return read_subject(LayoutDirectory(folder), "")


def test_the_base_has_the_first_layers(tmp_path: Path) -> None:
    whole, (ours,) = image_of(tmp_path / "base", "ab"), image_of(tmp_path / "ours", "abc").images
    assert base_of(whole, ours) is whole.images[0]


@pytest.mark.parametrize("names", ["ba", "b", "abcd", ""])
def test_an_image_with_other_layers_is_not_the_base(names: str, tmp_path: Path) -> None:
    """A plan names any image of any registry, for which the user may have a password."""
    whole, (ours,) = image_of(tmp_path / "other", names), image_of(tmp_path / "ours", "abc").images
    with pytest.raises(UsageError, match="are not the first ones"):
        base_of(whole, ours)
