"""The options of a build, as a frozen value."""

from dataclasses import dataclass, replace
from typing import Annotated, Self

from builder import settings
from builder.common import options as opt
from builder.common.options import Fields, Option
from builder.images.engines.choice import AUTO, ENGINES
from builder.pipeline.options import PlanOptions

_ENGINES = (AUTO, *ENGINES)


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options for an image: plan, engine, and destination."""

    plan: Annotated[PlanOptions, Fields(without=("upgrade",))]
    engine: Annotated[
        str,
        Option(
            "auto (Docker when it answers), buildkit, or oci (no daemon).",
            "|".join(_ENGINES),
            complete=_ENGINES,
        ),
    ] = AUTO
    #: where BuildKit runs, and its caches
    builder: opt.Builder = ""
    cache_from: Annotated[
        tuple[str, ...],
        Option(
            "Import finished steps from this cache: HOST/NAME:TAG, or in BuildKit's form, "
            "type=registry,ref=...; may be repeated (buildkit engine).",
            "CACHE",
        ),
    ] = ()
    cache_to: Annotated[
        tuple[str, ...],
        Option(
            "Export every finished step to this cache; may be repeated (buildkit engine).", "CACHE"
        ),
    ] = ()
    tag: Annotated[str | None, Option("Name of the image.", "[HOST/]NAME[:TAG]", "-t")] = None
    output: Annotated[
        str | None,
        Option(
            "Where the image is written: a Docker Engine, an OCI layout, or its registry.",
            "docker|oci:DIR|registry",
            "-o",
            complete=("docker", "oci:", "registry"),
        ),
    ] = None
    push: Annotated[bool, Option("Push the image after it is built.")] = False
    thin: Annotated[bool, Option("Leave the base image's blobs out of oci:DIR.")] = False
    all_platforms: Annotated[bool, Option("Patch every platform of the base's index.")] = False
    others: Annotated[
        str,
        Option(
            "What to do with platforms of the index that are not patched.",
            "keep|drop",
            complete=("keep", "drop"),
        ),
    ] = "drop"
    no_verify: Annotated[bool, Option("Skip verification of the built image.")] = False
    #: whether unknown code from the base may run here as the user
    trust_image: opt.TrustImage = False
    time_limit: Annotated[
        str | None,
        Option(
            "Stop after this time (90s, 45m, 2h) with exit 7, leaving nothing half-written.",
            "TIME",
            envvar=settings.TIME_LIMIT.name,
        ),
    ] = None
    dry_run: Annotated[bool, Option("Only print the plan.", names="-n")] = False
    print_dockerfile: Annotated[bool, Option("Print the Dockerfile, and stop.")] = False
    json: opt.Json = False

    @property
    def verify(self) -> bool:
        """Whether the image is verified after the build."""
        return not self.no_verify

    @property
    def is_index(self) -> bool:
        """Whether the result is an index of images."""
        return self.all_platforms or self.others != "drop"

    def settled(self) -> Self:
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
