"""The ``pins.toml`` files of the layers, written from typed pins."""

from __future__ import annotations

import pytest

from builder.documents.pulls import Pin
from builder.layers.catalog import Catalog
from builder.pipeline.pins import pins_text
from builder.util.documents import read

CATALOG = Catalog.discover()
PINNED = [name for name in CATALOG.folders if (CATALOG.folders[name] / "pins.toml").is_file()]


def test_layers_have_pins() -> None:
    assert PINNED


@pytest.mark.parametrize("name", PINNED)
def test_pins_are_written_as_they_were_read(name: str) -> None:
    pins = CATALOG.layer(name).pins
    pulls = [read(pull, Pin) for pull in pins.pull]
    text = pins_text({"wheel": pins.wheel, "donor": pins.donor, "pull": pulls, "code": pins.code})
    assert text == (CATALOG.folders[name] / "pins.toml").read_text("utf-8")
