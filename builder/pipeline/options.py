"""The command-line options as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from builder import settings
from builder.engines.kinds import AUTO, ENGINES
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.compile.container import ToolkitChoice
    from builder.verify.ongpu import GpuOptions


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which layers, on which base, and where the inputs of a plan come from."""

    #: profiles and layers as they were written; each may hold several names and commas
    layers: tuple[str, ...] = ()
    #: pull requests and commits, in the order of application
    with_pr: tuple[str, ...] = ()
    #: local git clones that answer in place of a forge: ``[OWNER/REPO=]DIR``
    forge_clone: tuple[str, ...] = ()
    #: folders with more layers
    patches: tuple[Path, ...] = ()
    base: str | None = None
    platform: str | None = None
    #: for a ``pypi:`` base
    python: str | None = None
    site_packages: str | None = None
    #: fail unless the project's lock holds
    locked: bool = False
    #: ask the package index again instead of the cache
    refresh: bool = False
    #: take nothing from the project's lock
    upgrade: bool = False
    #: whether what a prebuilt base lacks may be compiled, and in which image
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
        """What a command line selects; None is an option that it does not have."""
        return cls(
            layers=tuple(layers or ()),
            with_pr=tuple(with_pr or ()),
            forge_clone=tuple(forge_clone or ()),
            patches=tuple(patches or ()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names in ``layers``, one each."""
        words = (word.strip() for text in self.layers for word in text.split(","))
        return tuple(word for word in words if word)


def toolkit_choice(
    image: str | None, builder: str | None, *, compiling: bool = True
) -> ToolkitChoice | None:
    """What ``--toolkit`` and ``--builder`` say about where to compile; None: on this machine.

    Raises:
        UsageError: an image to compile in, and nothing is to be compiled; or no such builder.
    """
    if not image:
        return None
    if not compiling:
        raise UsageError(f"--toolkit {image} has no effect without --compile", hint="add --compile")
    from builder.compile.container import ToolkitChoice
    from builder.engines.builders import check_name
    from builder.engines.containers import Containers

    return ToolkitChoice(image, Containers(check_name(builder) if builder else ""))


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What image is to be built, by which engine, and where it goes."""

    plan: PlanOptions
    engine: str = "auto"
    #: where BuildKit runs, and where it keeps finished steps
    builder: str = ""
    cache_from: tuple[str, ...] = ()
    cache_to: tuple[str, ...] = ()
    tag: str | None = None
    output: str | None = None
    push: bool = False
    #: leave the base's own blobs out of a layout
    thin: bool = False
    #: patch every entry of the base's index; what becomes of the others: ``keep`` or ``drop``
    all_platforms: bool = False
    others: str = "drop"
    verify: bool = True
    #: whether code of the base that nobody knows may run here as the user
    trust_image: bool = False
    dry_run: bool = False
    print_dockerfile: bool = False
    json: bool = False

    @property
    def is_index(self) -> bool:
        """Whether the result is an index of images."""
        return self.all_platforms or self.others != "drop"

    def settled(self) -> ImageOptions:
        """With the engine that the other options are about; a setting gives way to an option."""
        kind = ENGINES.get(self.engine)
        bare = kind is not None and not kind.has_builders
        alone = bare or self.is_index or self.thin or self.plan.single_layer
        # where a toolkit image compiles, the builder is for that, and the choice has it
        aside = bare and self.plan.toolkit is not None
        if alone and (aside or self.builder == settings.BUILDER.value):
            return replace(self, builder="").settled() if self.builder else self
        asked = self.builder or self.cache_from or self.cache_to
        return replace(self, engine="buildkit") if asked and self.engine == AUTO else self


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is verified, against what, and which levels must run."""

    target: str
    plan: PlanOptions
    levels: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    #: where the evidence goes besides: a page, and a Markdown file that is appended to
    html: Path | None = None
    summary: Path | None = None
    prove_necessary: bool = False
    gpu: GpuOptions
    #: whether code of the target that nobody knows may run here as the user
    trust_image: bool = False
