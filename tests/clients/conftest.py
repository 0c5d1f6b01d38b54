"""All recipes: every model, profile and topology, in the formats of the clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.serving.models import Models
from builder.serving.recipe import Place, recipe_of
from tests.unit.serving.served import request, served
from tests.unit.serving.test_recipeformats import PLACES

if TYPE_CHECKING:
    from builder.serving.recipe import Recipe

#: Two nodes that sparkrun finds.
FOUND = (Place(topology="tp2", launcher="sparkrun"), Place(topology="tp2-ray", launcher="sparkrun"))


def made(*places: Place) -> list[Recipe]:
    """One of each model and topology; with files that a profile changes, and without."""
    unpatched = served(build="", mod="", image="vllm/vllm-openai:v0.33.0", has_ray=True)
    return [
        recipe_of(
            request(model, place=place, served=profile, speculate=model == "nemotron-3-super")
        )
        for model in Models.discover().files
        for place in places
        for profile in (served(has_ray=True), unpatched)
    ]


@pytest.fixture(scope="session")
def recipes() -> list[Recipe]:
    """With the addresses of two nodes."""
    return made(*PLACES.values())


@pytest.fixture(scope="session")
def found_recipes() -> list[Recipe]:
    """On nodes that the tool finds."""
    return made(*FOUND)
