"""The documents of the ``layers`` commands and of ``mods export``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from builder.applier.layers import Rendered
from builder.common.document import Count, Document, Part, Sha256, Text
from builder.common.documents.pulls import PinnedPull
from builder.layers.catalog import Expectation


class LayerRow(Part, frozen=True, kw_only=True):
    """A layer, in one row."""

    name: Text
    summary: Text


class ProfileRow(Part, frozen=True, kw_only=True):
    """A profile, in one row."""

    name: Text
    summary: Text
    layers: tuple[Text, ...]


class LayerList(Document, frozen=True, kw_only=True):
    """All profiles and layers."""

    profiles: tuple[ProfileRow, ...]
    layers: Annotated[tuple[LayerRow, ...], Meta(description="in order of application")]


class LayerShown(Document, frozen=True, kw_only=True):
    """A layer in rendered form."""

    digest: Sha256
    layer: Annotated[
        Rendered,
        Meta(
            description="layer.toml with every file in it",
            extra_json_schema={"required": ["name", "summary", "variants"]},
        ),
    ]
    pulls: Annotated[
        tuple[PinnedPull, ...], Meta(description="the pull requests that the layer is made of")
    ] = ()


class ProfileValues(Part, frozen=True, kw_only=True):
    """A profile, with its expectations."""

    name: Text
    summary: Text
    layers: tuple[Text, ...]
    image: str
    pypi: str
    expect: tuple[Expectation, ...]


class ProfileShown(Document, frozen=True, kw_only=True):
    """A profile."""

    profile: ProfileValues


class CheckedLayers(Document, frozen=True, kw_only=True):
    """The checked layers."""

    checked: tuple[Text, ...]


class NewLayer(Document, frozen=True, kw_only=True):
    """The new layer."""

    name: Text
    directory: Annotated[Text, Meta(description="the layer's folder; of a series, the parent")]
    series: Annotated[
        tuple[Text, ...], Meta(description="the layers of a patch series, in order")
    ] = ()
    dropped: Annotated[
        tuple[Text, ...], Meta(description="changed files that are not installed, and why")
    ] = ()
    unconverted: Annotated[
        tuple[Text, ...], Meta(description="what a mod does that is not in the layer, and why")
    ] = ()


class PinnedLayer(Document, frozen=True, kw_only=True):
    """The pinned inputs."""

    name: Text
    file: Annotated[Text, Meta(description="the pins.toml that was written")]
    inputs: Annotated[Count, Meta(description="wheels, donor files and pull requests in it")]


class ExportedMods(Document, frozen=True, kw_only=True):
    """The written or up-to-date mods."""

    directory: Text
    mods: Annotated[tuple[Text, ...], Meta(min_length=1)]
    written: Annotated[bool, Meta(description="false with --check")]
