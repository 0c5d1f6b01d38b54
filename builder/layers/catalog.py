"""Finds layers and profiles, and orders a selection.

To add a layer, add one folder; it is found here.
"""

from __future__ import annotations

import heapq
import os
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from builder import settings
from builder.applier.layers import Pull, Rendered
from builder.applier.values import all_match, normalize
from builder.common.console import console
from builder.common.document import Count, Document, Part, Sha256, Text, load_toml, read
from builder.common.paths import data_dir, package_file
from builder.common.plan import ExpectedChoice, PinnedPull
from builder.common.reference import NEWEST_VLLM
from builder.errors import UsageError, did_you_mean
from builder.layers.layerfile import load_layer
from builder.probes.dispatch_expect import MATCHERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.layers import Layer


class Expectation(ExpectedChoice, frozen=True, kw_only=True):
    """The expected result for a kind of layer, for a range of releases."""

    when: dict[str, str]

    @property
    def choice(self) -> ExpectedChoice:
        """The same, in the form of a plan."""
        return ExpectedChoice(
            kind=self.kind, line=self.line, selected=self.selected, refused=self.refused
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A named, ordered list of layers with a default base and expected kernels."""

    name: str
    summary: str
    layers: tuple[str, ...]
    image: str
    pypi: str
    pins: Mapping[str, str]
    needs: Mapping[str, str]
    needs_reason: str
    #: why the default base is not the newest release that the profile supports
    base_reason: str = ""
    #: layers that fix defects of the kernels, and select none
    fixes: tuple[str, ...] = ()
    #: name of the exported mod
    mod: str = ""
    expect: tuple[Expectation, ...] = ()

    @property
    def newest(self) -> str:
        """The newest vLLM release that is recorded and that the profile supports."""
        packages = {"vllm": NEWEST_VLLM}
        needs = {name: spec for name, spec in self.needs.items() if name in packages}
        return NEWEST_VLLM if all_match(needs, packages) else self.pypi.rpartition("==")[2]

    def expected(self, packages: Mapping[str, str]) -> list[Expectation]:
        """Expectations for these versions."""
        return [e for e in self.expect if all_match(e.when, packages)]


_PROFILE_KEYS = {"summary", "layers", "fixes", "base", "needs", "expect", "mod"}
_BASE_KEYS = {"image", "pypi", "pins", "reason"}


def load_profile(path: Path) -> Profile:
    """Read one profile file.

    Raises:
        UsageError: a key is missing or unknown.
    """
    try:
        raw = load_toml(path)
        base = raw["base"]
        for key in [*(set(raw) - _PROFILE_KEYS), *(set(base) - _BASE_KEYS)]:
            guess = did_you_mean(key, _PROFILE_KEYS | _BASE_KEYS)
            raise UsageError(f"{path.name}: unknown key {key!r}{guess}")
        needs = dict(raw.get("needs", {}))
        return Profile(
            name=path.stem,
            summary=raw["summary"],
            layers=tuple(raw["layers"]),
            fixes=tuple(raw.get("fixes", ())),
            image=base["image"],
            pypi=base["pypi"],
            pins={normalize(k): v for k, v in base.get("pins", {}).items()},
            base_reason=base.get("reason", ""),
            mod=raw.get("mod", path.stem),
            needs_reason=needs.pop("reason", ""),
            needs={normalize(k): v for k, v in needs.items()},
            expect=tuple(_expectation(path.name, entry) for entry in raw.get("expect", ())),
        )
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name}: not valid TOML: {error}") from None
    except KeyError as error:
        raise UsageError(f"{path.name}: key {error} is missing") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.name}: {error}") from None


def _expectation(file: str, raw: Mapping[str, Any]) -> Expectation:
    matchers = [key for key in raw if key not in ("when", "kind")]
    if len(matchers) != 1 or matchers[0] not in MATCHERS:
        raise UsageError(
            f"{file}: an expectation names one of {', '.join(MATCHERS)}, "
            f"not {', '.join(matchers) or 'nothing'}"
        )
    return read(raw, Expectation)


@dataclass(frozen=True)
class Selection:
    """The result of ``--layers``: layers in order of application, and profiles."""

    layers: tuple[Layer, ...]
    profiles: tuple[Profile, ...]

    @property
    def name(self) -> str:
        """A short name for tags: the profile's, or the layers joined."""
        if self.profiles:
            return "-".join(p.name for p in self.profiles)
        return "-".join(layer.name for layer in self.layers[:3])

    def pins(self) -> dict[str, str]:
        """Versions for packages that the base leaves open; the first profile wins."""
        merged: dict[str, str] = {}
        for profile in reversed(self.profiles):
            merged.update(profile.pins)
        return merged

    def expected(self, packages: Mapping[str, str]) -> tuple[ExpectedChoice, ...]:
        """What vLLM must log with these versions, by its profiles."""
        return tuple(e.choice for p in self.profiles for e in p.expected(packages))


#: Layers of one folder.
_MOST_LAYERS = 1000


def has_pulls(layer: Layer) -> bool:
    """Whether a layer has ops that need a forge."""
    return any(isinstance(op, Pull) for op in layer.ops)


@dataclass(frozen=True)
class Catalog:
    """Layers and profiles by name; layer files are read on demand."""

    folders: Mapping[str, Path]
    profile_files: Mapping[str, Path]
    #: layers replaced by one with the same name from a user's folder
    shadowed: Mapping[str, Path] = field(default_factory=dict)
    _loaded: dict[str, Layer] = field(default_factory=dict)

    @classmethod
    def discover(cls, extra: Iterable[Path] = ()) -> Catalog:
        """Our own ``patches/``, then ``SPARK_BUILD_PATCHES``, then ``extra``; later ones win.

        Raises:
            UsageError: a directory does not exist.
        """
        named = settings.PATCHES.value
        places = [data_dir("patches")]
        places += [Path(p).expanduser() for p in named.split(os.pathsep) if p]
        places += list(extra)
        folders: dict[str, Path] = {}
        shadowed: dict[str, Path] = {}
        for place in places:
            if not place.is_dir():
                raise UsageError(f"patches directory {place} does not exist")
            here = {p.parent.name: p.parent for p in sorted(place.glob("*/layer.toml"))}
            if not here:
                hint = f"--patches {place.parent}" if (place / "layer.toml").is_file() else ""
                raise UsageError(f"{place} contains no layer folder (NAME/layer.toml)", hint=hint)
            if len(here) > _MOST_LAYERS:
                raise UsageError(
                    f"{place} contains {len(here)} layer folders, and {_MOST_LAYERS} is the limit"
                )
            shadowed |= {name: folders[name] for name in here if name in folders}
            folders.update(here)
        profiles = {p.stem: p for p in sorted(package_file("profiles").glob("*.toml"))}
        return cls(folders, profiles, shadowed)

    def say_shadows(self, names: Iterable[str] = ()) -> None:
        """Report layers (of these, or of all) that replace others with the same name."""
        wanted = set(names) or set(self.shadowed)
        for name in sorted(wanted & set(self.shadowed)):
            old = self.shadowed[name]
            what = "the built-in one" if old.parent == data_dir("patches") else f"the one in {old}"
            console.warn(f"layer {name} is {self.folders[name]}, in place of {what}")

    def layer(self, name: str, *, kind: str = "layer") -> Layer:
        """One rendered layer; an error says that no ``kind`` has this name.

        Raises:
            UsageError: it does not exist, or its file is malformed.
        """
        if name not in self.folders:
            raise self._unknown(kind, name)
        if name not in self._loaded:
            self._loaded[name] = load_layer(self.folders[name])
        return self._loaded[name]

    def profile(self, name: str) -> Profile:
        """One profile.

        Raises:
            UsageError: no profile has this name.
        """
        if name not in self.profile_files:
            raise self._unknown("profile", name)
        return load_profile(self.profile_files[name])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names that ``--layers`` accepts."""
        return (*self.profile_files, *self.folders)

    def _unknown(self, kind: str, name: str) -> UsageError:
        return UsageError(
            f"unknown {kind} {name!r}{did_you_mean(name, self.names)}",
            hint="spark-build layers list",
        )

    def select(self, names: Sequence[str]) -> Selection:
        """Resolve ``--layers``: profile names, layer names, comma lists of both; then order them.

        Raises:
            UsageError: a name is unknown, the selection is empty, or ``after`` forms a cycle.
        """
        words = [word.strip() for name in names for word in name.split(",") if word.strip()]
        if not words:
            raise UsageError("no layer named", hint="spark-build layers list")
        profiles: list[Profile] = []
        wanted: dict[str, None] = {}
        for word in words:
            if word in self.profile_files:
                profile = self.profile(word)
                profiles.append(profile)
                wanted.update(dict.fromkeys(profile.layers))
            elif word in self.folders:
                wanted[word] = None
            else:
                raise self._unknown("layer or profile", word)
        self.say_shadows(wanted or ("",))
        return Selection(tuple(order([self.layer(n) for n in wanted])), tuple(profiles))


def order(layers: Sequence[Layer]) -> list[Layer]:
    """Topological order by ``after``, then by ``order``, then by name.

    Raises:
        UsageError: ``after`` forms a cycle.
    """
    by_name = {layer.name: layer for layer in layers}
    waiting = {n: {a for a in layer.after if a in by_name} for n, layer in by_name.items()}
    ready = [(by_name[n].order, n) for n, deps in waiting.items() if not deps]
    heapq.heapify(ready)
    done: list[Layer] = []
    while ready:
        _, name = heapq.heappop(ready)
        done.append(by_name[name])
        del waiting[name]
        for other, deps in waiting.items():
            if name in deps:
                deps.remove(name)
                if not deps:
                    heapq.heappush(ready, (by_name[other].order, other))
    if waiting:
        raise UsageError(f"layers {', '.join(sorted(waiting))}: 'after' forms a cycle")
    return done


# --------------------------------------------------------------------------------------- documents


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
