"""The ``pins.toml`` files of the layers, written from typed pins."""

from __future__ import annotations

import pytest

from builder.common.document import read
from builder.common.plan import Pin
from builder.common.pypi import WheelFile
from builder.layers.catalog import Catalog
from builder.pipeline.pins import pins_text, wheel_place

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


@pytest.mark.parametrize(
    ("end", "place"),
    [
        ("cp312-cp312-manylinux2014_aarch64.manylinux_2_28_aarch64", ("linux/arm64", "cp312")),
        ("cp312-cp312-manylinux_2_28_x86_64", ("linux/amd64", "cp312")),
        ("py3-none-any", ("any", "py3")),
        ("cp312-cp312-musllinux_1_2_aarch64", None),
        ("cp313-cp313t-manylinux_2_28_x86_64", None),
        ("cp312-cp312-macosx_11_0_arm64", None),
        ("cp312-cp312-manylinux_2_31_riscv64", None),
    ],
)
def test_wheels_for_other_systems_are_not_pinned(end: str, place: tuple[str, str] | None) -> None:
    """An image with CUDA has glibc: a wheel for musl would be another file of the same place."""
    file = WheelFile(filename=f"a-1-{end}.whl", url="", sha256="")
    assert wheel_place(file) == place


def test_no_layer_has_two_wheels_for_one_place() -> None:
    for name in PINNED:
        pins = CATALOG.layer(name).pins.wheel
        places = [(p.distribution, p.version, p.platform, p.python) for p in pins]
        assert len(places) == len(set(places)), name
