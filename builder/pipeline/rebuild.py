"""Rebuilds images from their own metadata, and compares each with the published one byte for byte.

A Docker Engine gives no access to an image's original layers, only to its files: such an image is
compared by digest, else file by file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import tempfile
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from msgspec import Meta
from packaging.version import Version

from builder import __version__, settings
from builder.applier.layers import Compile
from builder.common.console import confirm, console, print_json, some_of
from builder.common.diskspace import check_room
from builder.common.document import Digest, Document, Part, Text, always, plain, read
from builder.common.plan import PLAN_SCHEMA
from builder.common.pypi import PackageIndex
from builder.common.reference import LAYOUT, Ref, base_kind
from builder.compile.changes import build_files
from builder.compile.host import of_wheels
from builder.compile.link import DISTRIBUTIONS
from builder.compile.toolchain import WHEELS
from builder.compile.toolkit import toolkit_choice
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import OciEngine
from builder.images.registry.client import Repository
from builder.images.registry.copy import Locations
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.reference import parse_reference
from builder.images.rootfs.image import LayerCache
from builder.images.rootfs.tar import FILE, LayerTar, Unpacked
from builder.images.rootfs.view import Rootfs
from builder.layers.catalog import Catalog, Expectation, Profile, Selection
from builder.layers.pinned import IndexSources
from builder.layers.planner import make_plan
from builder.pipeline import bases
from builder.pipeline.allowedhosts import AllowedHosts
from builder.pipeline.inputs import stages_of
from builder.proof.opening import exact_ref
from builder.proof.trust import has_hook
from builder.publishing.evidence import toolkit_of_layer
from builder.publishing.run import mirrored_base
from builder.publishing.sources import EngineImage, open_source
from builder.publishing.subject import Baked, read_subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.common.plan import BuildPlan, ImageInputs, PlannedLayer
    from builder.compile.executor import ToolkitChoice
    from builder.images.bases.image import InEngine
    from builder.images.registry.model import Descriptor, ImageConfig, ImageSource
    from builder.images.subject import Subject
    from builder.pipeline.options import RebuildOptions
    from builder.publishing.sources import Opened
    from builder.publishing.subject import Image


# ------------------------------------------------------------------ differences between two images

#: How many files are compared by byte, and their maximum size in bytes.
_LOOKED_AT = 8
_LARGEST = 64 << 20
_LONGEST_VALUE = 200


class Difference(Part, frozen=True, kw_only=True):
    """One difference: its blob, the key or file, and the value on each side."""

    blob: str
    where: str
    what: str


@dataclass(frozen=True)
class ComparedImage:
    """One of the two images, and the source of its blobs."""

    source: ImageSource
    image: Image


def compare_images(published: ComparedImage, rebuilt: ComparedImage) -> list[Difference]:
    """All differences between two images; empty if their manifests are identical.

    Raises:
        RemoteError: a blob cannot be read.
    """
    if published.image.digest == rebuilt.image.digest:
        return []
    differences = [
        *compare_documents(
            _without_blobs(published.image.manifest.json()),
            _without_blobs(rebuilt.image.manifest.json()),
            f"manifest {published.image.digest}",
        )
    ]
    if published.image.config.digest != rebuilt.image.config.digest:
        differences += compare_documents(
            _without_layers(published.image.settings),
            _without_layers(rebuilt.image.settings),
            f"config {published.image.config.digest}",
        )
    return differences + compare_layers(published, rebuilt)


def _without_blobs(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in ("config", "layers")}


def _without_layers(config: ImageConfig) -> dict[str, Any]:
    """The configuration without its list of layers, which are compared themselves."""
    return {**config.document, "config": by_variable(config.settings), "rootfs": None}


def by_variable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an image with environment variables by name, so that a difference names one."""
    env = settings.get("Env")
    if not isinstance(env, list) or not all(isinstance(line, str) for line in env):
        return dict(settings)
    return {**settings, "Env": dict(line.partition("=")[::2] for line in env)}


def compare_documents(old: Any, new: Any, blob: str, path: str = "") -> list[Difference]:
    """Keys of two JSON values that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        pairs = [(f"{path}.{key}".lstrip("."), old.get(key), new.get(key)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(old, new, strict=True))]
    elif old == new:
        return []
    else:
        return [Difference(blob=blob, where=path, what=f"{_short(old)}, rebuilt {_short(new)}")]
    return [d for where, a, b in pairs for d in compare_documents(a, b, blob, where)]


def _short(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def compare_layers(published: ComparedImage, rebuilt: ComparedImage) -> list[Difference]:
    """Layer by layer, from the bottom up."""
    old, new = published.image.layers, rebuilt.image.layers
    differences = []
    if len(old) != len(new):
        what = f"{len(old)} layers, rebuilt {len(new)}"
        differences.append(Difference(blob=published.image.digest, where="layers", what=what))
    for number, (one, other) in enumerate(zip(old, new, strict=False)):
        if one.digest != other.digest:
            differences += _compare_layer(number, (published.source, one), (rebuilt.source, other))
    return differences


def _compare_layer(
    number: int, old: tuple[ImageSource, Descriptor], new: tuple[ImageSource, Descriptor]
) -> list[Difference]:
    blob = f"layer {number} {old[1].digest}"
    (old_tar, old_rows), (new_tar, new_rows) = _rows(*old), _rows(*new)
    differences, changed = compare_rows(old_rows, new_rows, blob)
    for path in changed[:_LOOKED_AT]:
        pair = _content(*old, path), _content(*new, path)
        differences.append(Difference(blob=blob, where=path, what=byte_range(*pair)))
    differences += [
        Difference(blob=blob, where=path, what="other content") for path in changed[_LOOKED_AT:]
    ]
    if not differences and old_tar == new_tar:
        what = "the same tar, compressed to other bytes: another build of zlib"
        differences.append(Difference(blob=blob, where="gzip", what=what))
    elif not differences:
        what = "the same files; times or order in the tar differ"
        differences.append(Difference(blob=blob, where="tar", what=what))
    return differences


def compare_rows(
    old: Mapping[str, tuple[Any, ...]], new: Mapping[str, tuple[Any, ...]], blob: str
) -> tuple[list[Difference], list[str]]:
    """Differences of names, kinds, modes and owners; and the files whose content differs.

    A row is ``(kind, mode, uid, gid, link, sha256)``.
    """
    differences, changed = [], []
    for path in sorted({*old, *new}):
        one, other = old.get(path), new.get(path)
        if one is None or other is None:
            what = "not in the image" if one is None else "not in the rebuilt one"
            differences.append(Difference(blob=blob, where=path, what=what))
            continue
        if one[:-1] != other[:-1]:
            what = f"{_row(one)}, rebuilt {_row(other)}"
            differences.append(Difference(blob=blob, where=path, what=what))
        if one[-1] != other[-1]:
            changed.append(path)
    return differences, changed


def _row(row: tuple[Any, ...]) -> str:
    kind, mode, uid, gid, link, _ = row
    return f"{kind} {mode:04o} {uid}:{gid}{f' -> {link}' if link else ''}"


def byte_range(old: bytes | None, new: bytes | None) -> str:
    """The bytes of a file that differ; offsets start at 0, and the end is inclusive."""
    if old is None or new is None:
        return "other content, too large to compare"
    size = f"{len(old)} bytes, rebuilt {len(new)}"
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if first is None:
        return f"{size}: one is the beginning of the other"
    longest = min(len(old), len(new)) - first
    same_end = 0
    while same_end < longest and old[-1 - same_end] == new[-1 - same_end]:
        same_end += 1
    old_end, new_end = len(old) - same_end, len(new) - same_end
    if old_end == first:
        return f"{new_end - first} bytes are missing at {first} ({size})"
    word = "are not in the rebuilt one" if new_end == first else "differ"
    return f"bytes {first}-{old_end - 1} {word} ({size})"


@contextmanager
def _tar(source: ImageSource, blob: Descriptor) -> Iterator[tuple[LayerTar, _Counted]]:
    where = f"{source.name}: {blob.digest}"
    with source.open(blob) as stream:
        counted = _Counted(Unpacked(stream, where))
        yield LayerTar(counted, where), counted  # type: ignore[arg-type]


class _Counted:
    """Unpacked bytes with their sha256, which is the layer's diff_id at the end."""

    def __init__(self, inner: Unpacked) -> None:
        self._inner, self._sha = inner, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._inner.read(size)
        self._sha.update(data)
        return data

    def skip(self, size: int) -> bool:
        while size > 0:
            data = self.read(min(size, 1 << 20))
            if not data:
                return False
            size -= len(data)
        return True

    def finish(self) -> str:
        while self.read(1 << 20):
            pass
        return self._sha.hexdigest()


def _rows(source: ImageSource, blob: Descriptor) -> tuple[str, dict[str, tuple[Any, ...]]]:
    """The layer's diff_id, and a row for each tar entry."""
    rows: dict[str, tuple[Any, ...]] = {}
    with _tar(source, blob) as (tar, counted):
        for member in tar:
            digest = hashlib.sha256()
            for piece in tar.chunks():
                digest.update(piece)
            content = digest.hexdigest() if member.kind == FILE else ""
            rows[f"/{member.path}"] = (
                member.kind, member.mode, member.uid, member.gid, member.link, content,
            )  # fmt: skip
        return counted.finish(), rows


def _content(source: ImageSource, blob: Descriptor, path: str) -> bytes | None:
    with _tar(source, blob) as (tar, _):
        for member in tar:
            if f"/{member.path}" == path and member.kind == FILE:
                return None if member.size > _LARGEST else b"".join(tar.chunks())
    return None


# ---------------------------------------------------------------------------------- the plan again
#
# The baked layers are complete (their inputs are pinned by sha256), and the baked plan has the
# base, packages and expected lines that they were judged on.  So later changes of a profile or
# layer have no effect here.
#
# A hook is Python code, and CMake runs the build files of a release with the changes of a diff.
# Code in an image is not trusted, so the image only names the text by digest: the same text must
# exist locally, and the user must agree to run it.


def baked_selection(baked: Baked) -> Selection:
    """The layers that ``--layers`` selected when the image was built."""
    plan = baked.plan
    expect = tuple(read({**plain(entry), "when": {}}, Expectation) for entry in plan.expect)
    profiles = tuple(
        Profile(
            name=name,
            summary="",
            layers=(),
            image="",
            pypi="",
            pins={},
            needs={},
            needs_reason="",
            expect=() if number else expect,
        )
        for number, name in enumerate(plan.profiles)
    )
    return Selection(baked.layers, profiles)


def base_reference(baked: Baked) -> Ref:
    """The base, fully pinned: every package version, or the image's digest."""
    base = baked.plan.base
    if base_kind(base.kind).is_wheels:
        return exact_ref(baked.plan)
    if base_kind(base.kind).is_image:
        if base.ref == LAYOUT:
            raise UsageError(
                f"the base {base.digest} was a local OCI layout",
                hint="name it with --base oci:DIR",
            )
        return Ref(f"docker://{base.ref.partition('@')[0]}@{base.digest}")
    raise UsageError(f"a {base.kind} base is not an image, so the plan is damaged")


@dataclasses.dataclass(frozen=True)
class BaseLookup:
    """A base to identify again.  ``python`` and ``site_packages`` are for a ``pypi:`` base."""

    reference: Ref
    selection: Selection
    platform: str
    python: str | None
    site_packages: str | None


def replan(
    baked: Baked,
    identify: Callable[[BaseLookup], Subject],
    sources: IndexSources,
    reference: Ref | None = None,
) -> tuple[BuildPlan, Subject]:
    """Judge the baked layers on the baked base; the caller closes the base.

    ``reference`` is the base's current location, if its own registry no longer has it.

    Raises:
        RemoteError: the base or an input no longer exists.
        UsageError: the base has changed.
    """
    base, build = baked.plan.base, _build_of(baked)
    selection = baked_selection(baked)
    of_wheels = base_kind(base.kind).is_wheels
    there = identify(
        BaseLookup(
            reference=reference or base_reference(baked),
            selection=selection,
            platform=base.platform,
            python=base.python if of_wheels else None,
            site_packages=base.site_packages if of_wheels else None,
        )
    )
    try:
        if reference is None and there.identity.digest != base.digest:
            raise UsageError(
                f"the base is {base.ref} with digest {base.digest}, but it is now "
                f"{there.identity.digest}"
            )
        identity = dataclasses.replace(there.identity, ref=base.ref, digest=base.digest)
        same = dataclasses.replace(there, identity=identity)
        make = partial(make_plan, epoch=build.epoch, single_layer=build.single_layer)
        again = make(same, selection, sources)
        if again.pending and sources.stages is not None:
            for stage in again.stages:
                sources.stages.run(stage, same)
            again = make(same, selection, sources)
        again = dataclasses.replace(again, name=baked.plan.name, hints=())
    except BaseException:
        there.close()
        raise
    return again, there


def _build_of(baked: Baked) -> ImageInputs:
    """The build inputs in the image's plan.

    Raises:
        UsageError: the plan has an older schema.
    """
    plan = baked.plan
    if plan.build is not None:
        return plan.build
    by = f"spark-build {baked.version}" if baked.version else "an older spark-build"
    names = plan.profiles or [layer.name for layer in plan.layers]
    raise UsageError(
        f"the image was made by {by} with a plan of schema {plan.schema}, which does not record "
        f"all inputs; this spark-build uses schema {PLAN_SCHEMA}, so it cannot rebuild the same "
        f"image",
        hint=f"spark-build image --layers {','.join(names)} --base {plan.base.ref}",
    )


def plan_differences(baked: Baked, again: BuildPlan) -> list[Difference]:
    """Differences between the new plan and the one in the image; empty if the digests are equal."""
    if again.digest == baked.plan.plan_digest:
        return []
    old = {key: value for key, value in baked.recorded.json.items() if key != "plan_digest"}
    new = {key: value for key, value in again.as_json().items() if key != "plan_digest"}
    return compare_documents(old, new, "plan")


# ----------------------------------------------------------------------- layers whose text is run

#: Build files that a message lists at most.
_LISTED = 3


def code_of(layer: Layer) -> str:
    """Which text of a layer runs on this machine when it is judged or compiled; "" if none does.

    Raises:
        ApplyError: a diff is malformed.
    """
    if has_hook(layer):
        return "has a hook (Python code)"
    diffs = [op.diff for op in layer.ops if isinstance(op, Compile) and op.diff]
    files = sorted({path for diff in diffs for path in build_files(diff)})
    return f"changes files that CMake runs ({some_of(files, _LISTED)})" if files else ""


def with_own_code(
    baked: Baked, image: str, patches: Sequence[Path], ask: Callable[[str], None]
) -> Baked:
    """The image's metadata, with the local text of every layer that runs code.

    Args:
        baked: the image's metadata.
        image: the name that the user gave.
        patches: the user's folders of layers; read only if a layer runs code.
        ask: asks for confirmation; raises if the answer is no.

    Raises:
        UsageError: a layer is missing, or differs from the plan's.
    """
    code = {layer.name: code for layer in baked.layers if (code := code_of(layer))}
    if not code:
        return baked
    catalog = Catalog.discover(patches)
    digests = {layer.name: layer.digest for layer in baked.plan.layers}

    def own(layer: Layer) -> Layer:
        what = f"layer {layer.name} of {image} {code[layer.name]}"
        return _own(layer, what, digests.get(layer.name, ""), image, catalog, ask)

    layers = tuple(own(layer) if layer.name in code else layer for layer in baked.layers)
    return dataclasses.replace(baked, layers=layers)


def _own(
    layer: Layer,
    what: str,
    digest: str,
    image: str,
    catalog: Catalog,
    ask: Callable[[str], None],
) -> Layer:
    name = layer.name
    if name not in catalog.folders:
        pulls = [op.pull for op in layer.ops if isinstance(op, Compile) and op.pull]
        if pulls and not has_hook(layer):
            raise UsageError(
                f"{what}; code from an image is never run: build the image again from the pull "
                f"request {pulls[0].repository}#{pulls[0].number}, and compare the digests"
            )
        raise UsageError(
            f"{what}; code from an image is never run, and there is no local layer of this name: "
            f"--patches must name a folder with your copy of {name}/layer.toml",
            hint=f"spark-build rebuild {shlex.quote(image)} --patches DIR",
        )
    folder, own = catalog.folders[name], catalog.layer(name)
    if own.digest != digest:
        raise UsageError(
            f"{what}, but {folder} differs: the image's plan says layer "
            f"{digest[:16] or 'of no digest'}, the folder is {own.digest[:16]}; use the folder "
            f"that the image was made from",
            hint=f"spark-build layers show {name}",
        )
    ask(f"run the {'hook' if has_hook(own) else 'build files'} of {folder} as you")
    return own


def refuse_unreleased(base: Subject, ask: Callable[[str], None]) -> None:
    """Ask before CMake runs the sources of a commit that a base names, which is on any fork.

    Raises:
        SparkBuildError: the user declined, or cannot be asked.
    """
    vllm = base.identity.packages.get("vllm", "")
    if vllm and Version(vllm).is_devrelease:
        ask(f"run CMake on the sources of vllm {vllm} as you; the image names their commit")


# ------------------------------------------------------------------------------------- the rebuild

#: Prefix of history entries written by the embedded engine.
OUR_STEP = "spark-build layer "


class Original(Protocol):
    """The image to reproduce."""

    @property
    def digest(self) -> str:
        """Its digest."""

    @property
    def baked(self) -> Baked:
        """The baked metadata."""

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:
        """Differences from its rebuild; empty if it is the same image."""


@dataclass(frozen=True)
class StoredOriginal:
    """An image in a registry or a layout."""

    source: ImageSource
    image: Image
    baked: Baked

    @property
    def digest(self) -> str:
        """Digest of its manifest."""
        return self.image.digest

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:  # noqa: ARG002
        """Layer by layer and key by key."""
        return compare_images(ComparedImage(self.source, self.image), rebuilt)


class Rebuilt(Part, frozen=True, kw_only=True):
    """The result of a rebuild."""

    digest: Annotated[Digest, Meta(description="of the image that was published")]
    rebuilt: Annotated[Digest, Meta(description="of the rebuilt image")]
    same: bool
    plan_digest: Digest
    made_by: Annotated[str, Meta(description="the version of spark-build that published it")]
    rebuilt_by: Text = always(__version__)
    differences: tuple[Difference, ...]


class Rebuild(Document, frozen=True, kw_only=True):
    """An image that was rebuilt from its metadata."""

    image: Text
    same: bool
    images: Annotated[tuple[Rebuilt, ...], Meta(description="one a platform")]


def rebuild(
    original: Original,
    baked: Baked,
    identify: Callable[[BaseLookup], Subject],
    sources: IndexSources,
    reference: Ref | None = None,
) -> Rebuilt:
    """Plan, build and compare.  ``reference`` is the base's current location.

    ``baked`` is the original's metadata, without code from it (`builder.pipeline.rebuild`).

    Raises:
        SparkBuildError: the base or an input no longer exists, or the plan cannot be built here.
    """
    plan, base = replan(baked, identify, sources, reference)
    try:
        changes = plan_differences(baked, plan)
        with build_again(plan, base) as again:
            changes += original.differences(again, plan)
            digest = again.image.digest
    finally:
        base.close()
    return Rebuilt(
        digest=original.digest,
        rebuilt=digest,
        same=not changes,
        plan_digest=plan.digest,
        made_by=baked.version,
        differences=tuple(changes),
    )


@contextmanager
def build_again(plan: BuildPlan, base: Subject) -> Iterator[ComparedImage]:
    """The image of a plan, in a temporary folder, without the base's blobs.

    Raises:
        UsageError: the embedded engine does not build this plan.
        BuildFailed: the disk is full.
    """
    engine = OciEngine()
    refusal = engine.refuses(plan)
    if refusal:
        raise UsageError(refusal)
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        output = Path(folder) / "layout"
        request = BuildRequest(plan=plan, tag="rebuild", output=output, base=base, thin=True)
        check_room(engine.needs(request))
        engine.build(request)
        source = LayoutDirectory(output)
        (rebuilt,) = read_subject(source, "").images
        yield ComparedImage(source, rebuilt)


# ---------------------------------------------------------------------- an image in a Docker Engine


_SETTINGS = ("Env", "Labels", "Entrypoint", "Cmd", "User", "WorkingDir")


@dataclass(frozen=True)
class EngineOriginal:
    """An image in a Docker Engine to reproduce."""

    image: InEngine
    baked: Baked

    @property
    def digest(self) -> str:
        """Its ID."""
        return self.image.id

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:
        """No differences if the engine has the image under a digest of the rebuilt one.

        Raises:
            RemoteError: a rebuilt layer cannot be read.
        """
        if set(self.image.digests) & set(rebuilt.image.digests):
            return []
        differences = self._settings(rebuilt)
        added = sum(step.created_by.startswith(OUR_STEP) for step in rebuilt.image.settings.history)
        view = Rootfs(rebuilt.image.layers[-added:], LayerCache(rebuilt.source))
        with closing(view):
            differences += [*_files(self.image, view), *_gone(self.image, plan)]
        if not differences:
            what = (
                "every file and setting is the same; only the tars were written by another builder"
            )
            differences.append(Difference(blob=self.digest, where="layers", what=what))
        return differences

    def _settings(self, rebuilt: ComparedImage) -> list[Difference]:
        new = rebuilt.image.settings.settings
        old = self.image.image.attrs.get("Config") or {}
        return compare_documents(_plain(old), _plain(new), f"config {self.digest}")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Relevant settings; engines write defaults as missing, as null or as a value."""
    named = by_variable(settings)
    return {key: named.get(key) for key in _SETTINGS if named.get(key) not in (None, "", "/")}


def _files(image: InEngine, view: Rootfs) -> Iterator[Difference]:
    for path, entry in sorted(view.below("/").items()):
        if entry.kind != FILE:
            continue
        original, new = image.read(f"/{path}"), view.read(f"/{path}")
        if original is None:
            yield Difference(blob="files", where=f"/{path}", what="not in the image")
        elif original != new:
            yield Difference(blob="files", where=f"/{path}", what=byte_range(original, new))


def _gone(image: InEngine, plan: BuildPlan) -> Iterator[Difference]:
    """Files of the base that the plan removes."""
    if not plan.base.is_image:
        return
    for path, content in plan.changes.items():
        place = f"{plan.base.site_packages}/{path}"
        if content is None and image.has(place):
            yield Difference(blob="files", where=place, what="not in the rebuilt one")


# ---------------------------------------------------------------------- every image of a reference


#: The most differences that are printed; the JSON document has all.
_SHOWN = 12


def rebuild_all(options: RebuildOptions) -> None:
    """Rebuild an image from its own metadata; exit 5 if the result differs."""
    index = PackageIndex(refresh=options.refresh)
    compiled = False

    def identify(wanted: BaseLookup) -> Subject:
        base = bases.identify_base(
            wanted.reference,
            wanted.selection,
            index,
            platform=wanted.platform,
            python=wanted.python,
            site_packages=wanted.site_packages,
            in_engine=False,
            libraries=DISTRIBUTIONS if compiled else (),
        )
        if compiled:
            try:
                refuse_unreleased(base, agreed)
            except BaseException:
                base.close()
                raise
        return base

    def agreed(action: str) -> None:
        if not options.yes:
            confirm(action, "", "nothing was rebuilt")

    moved = Ref(options.base) if options.base else None
    named = [Ref(options.image), *([moved] if moved else [])]
    hosts = AllowedHosts(named, options.allow_host)

    def check(host: str) -> None:
        hosts.need([host], f"{options.image} has layers in")

    with Locations(check=check) as places, open_source(Ref(options.image), places) as opened:
        results = []
        originals = _originals(opened, options.image)
        hosts.need(_hosts_in(originals, moved), f"the plan of {options.image} names")
        for original in originals:
            baked = with_own_code(original.baked, options.image, options.patches, agreed)
            sections = [row.compile for row in original.baked.plan.layers if row.compile]
            compiled = any(row.stage or row.sources for row in sections)
            compiled_stages = [row.stage for row in sections if row.stage]
            nvcc = WHEELS if any(of_wheels(stage.inputs) for stage in compiled_stages) else None
            toolkit = _toolkit(original.baked.plan.layers)
            stages = stages_of(index, nvcc=nvcc, toolkit=toolkit) if compiled else None
            sources = IndexSources(index, stages)
            with console.step(f"rebuild {original.digest}"):
                try:
                    again = rebuild(original, baked, identify, sources, moved)
                except RemoteError as error:
                    mirror = None if moved else _mirror(original)
                    if mirror is None:
                        raise
                    console.say(f"  {error}\n  using the mirrored copy: {mirror}")
                    again = rebuild(original, baked, identify, sources, Ref(mirror))
                results.append(again)
        _report(options.image, results, json=options.json)


def _hosts_in(originals: Iterable[Original], moved: Ref | None) -> Iterator[str]:
    """The registries that plans name: of bases, unless the user says where they are now, and of
    images to compile in."""
    for original in originals:
        base = original.baked.plan.base
        if moved is None and base_kind(base.kind).is_image and base.ref != LAYOUT:
            yield parse_reference(base_reference(original.baked).text).host
        for layer in original.baked.plan.layers:
            if toolkit := toolkit_of_layer(layer):
                yield parse_reference(f"{toolkit.image}@{toolkit.digest}").host


def _toolkit(layers: Iterable[PlannedLayer]) -> ToolkitChoice | None:
    """The exact image in which the plan was compiled."""
    for layer in layers:
        if toolkit := toolkit_of_layer(layer):
            image = f"{toolkit.image}@{toolkit.digest}"
            return toolkit_choice(image, settings.BUILDER.value or None)
    return None


def _originals(opened: Opened, text: str) -> list[Original]:
    if isinstance(opened, EngineImage):
        return [EngineOriginal(opened.image, opened.baked)]
    originals: list[Original] = [
        StoredOriginal(opened.source, image, opened.baked[image.digest])
        for image in opened.subject.ours
    ]
    if not originals:
        raise UsageError(f"{text} was not made by spark-build, so it has no plan to rebuild from")
    return originals


def _mirror(original: Original) -> str | None:
    """The copy of the base that ``publish --mirror-base`` made."""
    if isinstance(original, StoredOriginal) and isinstance(original.source, Repository):
        return mirrored_base(original.source, original.image)
    return None


def _report(text: str, results: list[Rebuilt], *, json: bool) -> None:
    same = all(result.same for result in results)
    if json:
        print_json(Rebuild(image=text, same=same, images=tuple(results)))
    for result in results:
        for difference in result.differences[:_SHOWN]:
            console.say(f"  {difference.blob}  {difference.where}: {difference.what}")
        if len(result.differences) > _SHOWN:
            console.say(f"  and {len(result.differences) - _SHOWN} more (--json has all of them)")
        if result.same and not json:
            print(f"same {result.digest}")
    if same:
        return
    wrong = next(result for result in results if not result.same)
    first = wrong.differences[0]
    count = len(wrong.differences)
    raise SparkBuildError(
        f"{wrong.digest} does not match its plan: the rebuilt image is {wrong.rebuilt}; "
        f"{count} {'difference' if count == 1 else 'differences'}, "
        f"first {first.blob} {first.where}: {first.what}",
        Exit.VERIFY_FAILED,
        hint=_hint(wrong),
    )


def _hint(wrong: Rebuilt) -> str:
    """The hint for an image of another spark-build, which adds other files."""
    if wrong.made_by != __version__:
        return f"rebuild it with spark-build {wrong.made_by}, not {__version__}"
    if any((d.blob, d.where) == ("plan", "build.files") for d in wrong.differences):
        return f"another build of spark-build {__version__} made it: its files differ"
    return ""
