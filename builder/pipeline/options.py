"""The command-line options as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from builder import settings
from builder.errors import UsageError
from builder.images.engines.choice import AUTO, ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.compile.executor import ToolkitChoice
    from builder.proof.ongpu import GpuOptions


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options for layers, base, and the sources of a plan's inputs."""

    #: profiles and layers as given; each may have several names with commas
    layers: tuple[str, ...] = ()
    #: pull requests and commits, in the order of application
    with_pr: tuple[str, ...] = ()
    #: local git clones to use instead of a forge: ``[OWNER/REPO=]DIR``
    forge_clone: tuple[str, ...] = ()
    #: additional folders of layers
    patches: tuple[Path, ...] = ()
    base: str | None = None
    platform: str | None = None
    #: for a ``pypi:`` base
    python: str | None = None
    site_packages: str | None = None
    #: fail unless the project's lock is current
    locked: bool = False
    #: query the package index instead of the cache
    refresh: bool = False
    #: ignore the project's lock
    upgrade: bool = False
    #: whether missing kernels may be compiled, and in which image
    compile_here: bool = False
    toolkit: ToolkitChoice | None = None
    #: one image layer for all patches
    single_layer: bool = False

    @classmethod
    def selecting(
        cls,
        layers: Sequence[str] | None,
        with_pr: Sequence[str] | None,
        forge_clone: Sequence[str] | None,
        patches: Sequence[Path] | None,
    ) -> Self:
        """The selection of a command line; None means that the command lacks the option."""
        return cls(
            layers=tuple(layers or ()),
            with_pr=tuple(with_pr or ()),
            forge_clone=tuple(forge_clone or ()),
            patches=tuple(patches or ()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The single names in ``layers``."""
        words = (word.strip() for text in self.layers for word in text.split(","))
        return tuple(word for word in words if word)


def toolkit_choice(
    image: str | None, builder: str | None, *, compiling: bool = True
) -> ToolkitChoice | None:
    """Where to compile, from ``--toolkit`` and ``--builder``; None means on this machine.

    Raises:
        UsageError: ``--toolkit`` without ``--compile``, or the builder is invalid.
    """
    if not image:
        return None
    if not compiling:
        raise UsageError(f"--toolkit {image} has no effect without --compile", hint="add --compile")
    from builder.compile.executor import ToolkitChoice
    from builder.images.engines.buildx import check_name
    from builder.images.engines.containers import Containers

    return ToolkitChoice(image, Containers(check_name(builder) if builder else ""))


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options for an image: plan, engine, and destination."""

    plan: PlanOptions
    engine: str = "auto"
    #: where BuildKit runs, and its caches
    builder: str = ""
    cache_from: tuple[str, ...] = ()
    cache_to: tuple[str, ...] = ()
    tag: str | None = None
    output: str | None = None
    push: bool = False
    #: leave the base's blobs out of a layout
    thin: bool = False
    #: patch every entry of the base's index; ``keep`` or ``drop`` other entries
    all_platforms: bool = False
    others: str = "drop"
    verify: bool = True
    #: whether unknown code from the base may run here as the user
    trust_image: bool = False
    dry_run: bool = False
    print_dockerfile: bool = False
    json: bool = False

    @property
    def is_index(self) -> bool:
        """Whether the result is an index of images."""
        return self.all_platforms or self.others != "drop"

    def settled(self) -> ImageOptions:
        """The options with the engine that they imply; options override settings."""
        kind = ENGINES.get(self.engine)
        bare = kind is not None and not kind.has_builders
        alone = bare or self.is_index or self.thin or self.plan.single_layer
        # with a toolkit image the builder is for compiling, and part of that choice
        aside = bare and self.plan.toolkit is not None
        if alone and (aside or self.builder == settings.BUILDER.value):
            return replace(self, builder="").settled() if self.builder else self
        asked = self.builder or self.cache_from or self.cache_to
        return replace(self, engine="buildkit") if asked and self.engine == AUTO else self


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options for verification: target, comparison, and levels."""

    target: str
    plan: PlanOptions
    levels: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    #: additional outputs of the evidence: an HTML page, and a Markdown file to append to
    html: Path | None = None
    summary: Path | None = None
    prove_necessary: bool = False
    gpu: GpuOptions
    #: whether unknown code from the target may run here as the user
    trust_image: bool = False
