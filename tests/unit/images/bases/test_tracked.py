"""Which distributions of a base are looked at."""

from __future__ import annotations

from builder.images.subject import TRACKED, tracked_for
from tests.unit.fakes import make_layer, make_wheel


def test_what_layers_name_is_tracked_too() -> None:
    tool = {"op": "wheel", "distribution": "Some.Tool", "version-of": "its_base",
            "if": {"condition": ">=1.0"}}  # fmt: skip
    gone = {"op": "remove", "distribution": "gone"}
    layer = make_layer("tool", tool, gone, wheels=[make_wheel("Some.Tool", "1.0", {})])
    assert tracked_for([]) == TRACKED
    added = set(tracked_for([layer])) - set(TRACKED)
    assert added == {"some-tool", "its-base", "gone", "condition"}
