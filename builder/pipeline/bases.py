"""The base of a build: the profile's default, and identifying it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from builder.common.console import console
from builder.common.plan import Platform
from builder.common.pypi import vllm_releases
from builder.common.reference import NEWEST_VLLM, Ref
from builder.common.wheels import RemoteWheel, WheelTree
from builder.errors import SparkBuildError, UsageError
from builder.images.bases.identify import identify
from builder.images.subject import BaseRequest, no_facts, tracked_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.trees import Tree
    from builder.common.pypi import PackageIndex
    from builder.images.subject import FactsOf, Subject
    from builder.layers.catalog import Profile, Selection


def default_base(selection: Selection, in_engine: bool | None, *, pull: bool) -> Ref:
    """The profile's image if a Docker Engine has it or can pull it, else its released wheels.

    Raises:
        UsageError: no profile is selected, so there is no default.
    """
    if not selection.profiles:
        raise UsageError(
            "no base: give --base, or a profile that has one",
            hint=f"--base pypi:vllm=={NEWEST_VLLM}",
        )
    profile = selection.profiles[0]
    ref = _default_of(profile, in_engine, pull=pull)
    if profile.newest not in ref.text:
        why = f": {profile.base_reason}" if profile.base_reason else ""
        console.say(f"  no --base: {ref}, the default of {profile.name}{why}")
        of_wheels = ref.kind.is_wheels
        newest = f"{'pypi:vllm==' if of_wheels else 'vllm/vllm-openai:v'}{profile.newest}"
        console.say(f"  the newest supported release: --base {newest}")
    return ref


def _default_of(profile: Profile, in_engine: bool | None, *, pull: bool) -> Ref:
    if in_engine is not False:
        from builder.images.engines import docker

        try:
            client = docker.connect()
        except SparkBuildError as error:
            console.say(f"  {error}; released wheels are used")
            return Ref(profile.pypi)
        try:
            name = Ref(profile.image).place
            docker.find_image(client, name, "linux/arm64", pull=pull)
        except SparkBuildError as error:
            console.say(f"  {error}")
            console.say(f"  using {profile.pypi} instead")
            return Ref(profile.pypi)
        finally:
            client.close()
        return Ref(name)
    return Ref(profile.pypi)


def identify_base(
    ref: Ref,
    selection: Selection,
    index: PackageIndex,
    *,
    platform: str | None,
    python: str | None = None,
    site_packages: str | None = None,
    in_engine: bool | None = None,
    pins: Mapping[str, str] | None = None,
    libraries: Sequence[str] = (),
    facts_of: FactsOf | None = None,
    noting: bool = False,
) -> Subject:
    """Identify a base, including packages that user layers name.

    ``pins`` are versions for packages that the base leaves open; they override the profiles'.
    ``libraries`` are distributions whose files an image's tree must also include: it lists only
    those of requested distributions.  They do not affect the base's identity.  ``in_engine``,
    ``facts_of`` and ``noting`` are as in :class:`builder.images.subject.BaseRequest`.
    """
    tracked = tracked_for(selection.layers)
    also = [n for n in libraries if n not in tracked] if ref.kind.is_image else []
    base = identify(
        BaseRequest(
            ref=ref,
            platform=platform,
            python=python,
            site_packages=site_packages,
            pins={**selection.pins(), **(pins or {})},
            tracked=(*tracked, *also),
            index=index,
            in_engine=in_engine,
            facts_of=facts_of or no_facts,
            noting=noting,
        )
    )
    if not also:
        return base
    packages = {n: v for n, v in base.identity.packages.items() if n not in also}
    return replace(base, identity=replace(base.identity, packages=packages))


@dataclass(frozen=True, kw_only=True)
class ReleasedTrees:
    """The releases of one package with their files: of vLLM with what it pins, of others alone."""

    package: str
    #: the layers that are judged, whose packages a vLLM's tree has too
    selection: Selection
    index: PackageIndex
    platform: str | None = None

    def versions(self, named: str | None = None) -> list[str]:
        """The named releases, or all final ones, oldest first."""
        if named or self.package == "vllm":
            return vllm_releases(self.index, named)
        released = self.index.releases(self.package)
        return [version for version in released if not Version(version).is_prerelease]

    def tree(self, version: str) -> Tree:
        """The files of a release.

        Raises:
            UsageError: it has no wheel for the platform.
        """
        if self.package == "vllm":
            ref = Ref(f"pypi:vllm=={version}")
            return identify_base(ref, self.selection, self.index, platform=self.platform).tree
        platform = Platform.parse(self.platform) if self.platform else Platform()
        file = self.index.choose(self.package, version, platform)
        return WheelTree([RemoteWheel(file, self.index)])

    def trees(self, named: str | None = None) -> Iterator[tuple[str, Tree]]:
        """Those with a wheel for the platform."""
        for version in self.versions(named):
            with suppress(UsageError):
                yield version, self.tree(version)
