"""The embedded engine: writes images itself; needs no daemon, no root and no GPU.

For a ``pypi:`` base it makes an overlay; for an image in a registry or a layout, the patched image.
Either goes into an OCI layout, a registry or a Docker Engine, and its bytes depend on the plan
alone.  For several platforms it patches entries of the base's index, in a new index; the others are
kept byte for byte, or left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from builder.applier.applying import leftovers
from builder.applier.files import DOCUMENT, open_regular, read_regular
from builder.applier.receipts import final_digests, receipts_of
from builder.applier.trees import OverlayTree
from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.console import console, counted, megabytes
from builder.common.diskspace import Need
from builder.common.document import plain
from builder.common.files import write_atomically
from builder.common.hints import OUTPUT, os_hint, reason
from builder.common.leftovers import keep_latest, making
from builder.common.paths import cache_dir
from builder.common.reference import Ref
from builder.common.wheels import deflated
from builder.errors import BuildFailed, EngineError, RemoteError, UsageError
from builder.images.engines import baked, docker, metadata
from builder.images.engines.docker import engine_needs
from builder.images.engines.dockerfile import quoted
from builder.images.engines.metadata import added_bytes, content_bytes, image_layers
from builder.images.engines.model import BuildRequest, BuiltImage, refuses_base
from builder.images.registry.copy import layout_place
from builder.images.registry.layout import (
    FallbackSource,
    LayoutDirectory,
    LayoutWriter,
    add_image,
    check_layout_target,
    work_folder,
)
from builder.images.registry.model import (
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    ImageConfig,
    RawManifest,
    blobs,
    check_manifest,
    entries,
    is_index,
    parse_config,
    sha256_digest,
)
from builder.images.rootfs import limits
from builder.images.rootfs.image import LayerCache, find_image, read_config
from builder.images.rootfs.tar import (
    DIR,
    FILE,
    FOLDER,
    ITS_OWN,
    LEVEL,
    PIECE,
    Owners,
    layer_entries,
    tar_layer,
)
from builder.images.rootfs.view import InLayers, Rootfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from docker import DockerClient

    from builder.applier.trees import Changes, Content, Distribution, Tree
    from builder.common.plan import BuildPlan, LayerDecision, PlanDocument, RecordedPlan
    from builder.images.registry.copy import Locations
    from builder.images.registry.model import ImageSource
    from builder.images.subject import Subject


# ------------------------------------------------------------------------------------------ layers
#
# A layer with the same inputs is reused: ``blobs/KEY/`` holds a compressed layer and a record of
# it.  The key is a digest of everything that decides the layer's bytes: its part of the plan, every
# tar entry, the timestamp, and the compression.  It does not depend on other layers.


#: Increased when the same entries would give different bytes.
RECIPE = 1
#: Size limit of all cached layers; the least recently used are removed first.
MOST_BYTES = 2 << 30
#: A layer is cached only if this many times its size is free, because the build needs space too.
_ROOM = 4
_CHUNK = 1 << 20
_PLANNED = ("digest", "variant", "inputs", "files")


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of an image layer: patch layers of a plan, or baked-in files."""

    platform: str
    names: tuple[str, ...]
    planned: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, plan: BuildPlan, names: Sequence[str]) -> LayerInputs:
        """The part of a plan for some of its layers.

        Only what the bytes depend on is included: the layer's digest, its variant
        and pinned inputs, and the hash of each file before and after.
        """
        planned = tuple(_planned(d) for d in plan.needed if d.name in names)
        return cls(plan.base.platform.oci, tuple(names), planned)


def _planned(decision: LayerDecision) -> dict[str, Any]:
    fields = plain(decision.document)
    return {name: fields[name] for name in _PLANNED if name in fields}


@dataclass(frozen=True)
class CachedLayer:
    """A finished layer: digest and size of the compressed tar, and its diff_id."""

    digest: str
    diff_id: str
    size: int


def layer_key(
    inputs: LayerInputs, files: Mapping[str, Content | None], epoch: int, owners: Owners
) -> str:
    """The key of a layer, from its entries and its part of the plan; reads no content."""
    rows: list[list[Any]] = []
    for name, path, content in layer_entries(files):
        if content == "dir":
            rows.append([name, "dir", *owners.folder(path)])
        else:
            sha256 = None if content is None else content.sha256
            rows.append([name, sha256, *owners.of(path, content)])
    value = {
        "recipe": RECIPE,
        "compression": ["gzip", LEVEL, PIECE, ITS_OWN, zlib.ZLIB_RUNTIME_VERSION],
        "platform": inputs.platform,
        "planned": [dict(part) for part in inputs.planned],
        "epoch": epoch,
        "entries": rows,
    }
    return sha256_hex(canonical_json(value))


def _folder(key: str) -> Path:
    return cache_dir() / "blobs" / key


def take_cached_layer(key: str, target: Path) -> CachedLayer | None:
    """Copy a cached layer to ``target``, checked against its digest; None if there is none.

    A damaged one is reported and removed.
    """
    folder = _folder(key)
    try:
        record = json.loads((folder / "record.json").read_bytes())
        layer = CachedLayer(**{name: record[name] for name in CachedLayer.__dataclass_fields__})
        if record["check"] != _check(key, layer):
            raise ValueError("its record is damaged")
        with (folder / "layer").open("rb") as source, target.open("wb") as out:
            digest, size = _copied(source, out)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _damaged(folder, str(error))
        return None
    if (digest, size) != (layer.digest, layer.size):
        target.unlink()
        _damaged(folder, f"its digest is {digest}, expected {layer.digest}")
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)
    return layer


def _damaged(folder: Path, how: str) -> None:
    console.warn(f"a cached layer is damaged and will be rebuilt: {folder}: {how}")
    shutil.rmtree(folder, ignore_errors=True)


def _check(key: str, layer: CachedLayer) -> str:
    return sha256_hex(canonical_json([key, layer.digest, layer.diff_id, layer.size]))


def _copied(source: IO[bytes], out: IO[bytes]) -> tuple[str, int]:
    sha, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        sha.update(chunk)
        out.write(chunk)
        size += len(chunk)
    return f"sha256:{sha.hexdigest()}", size


def cache_layer(key: str, layer: CachedLayer, source: Path) -> None:
    """Cache a new layer; a full disk is not an error."""
    folder = _folder(key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if layer.size > MOST_BYTES or free < _ROOM * layer.size:
            console.detail(f"not cached: {megabytes(layer.size)}")
            return
        keep_latest(
            [other for other in folder.parent.iterdir() if (other / "layer").is_file()],
            most_bytes=MOST_BYTES - layer.size,
            size=lambda other: (other / "layer").stat().st_size,
        )
        with making(folder) as work:
            work.mkdir()
            shutil.copyfile(source, work / "layer")
            record = {**vars(layer), "check": _check(key, layer)}
            (work / "record.json").write_text(json.dumps(record))
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
    except OSError as error:
        console.detail(f"not cached: {error}")


# -------------------------------------------------------------- the layout that they are written to


@dataclass(frozen=True)
class Blob:
    """A blob in the layout; ``diff_id`` is the digest of a layer's uncompressed tar."""

    digest: str
    size: int
    media_type: str
    diff_id: str = ""
    #: whether it came from the cache
    cached: bool = False

    def descriptor(self) -> dict[str, str | int]:
        """The OCI content descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


def say_layer(name: str, files: int, blob: Blob) -> None:
    """Print one line about an added layer."""
    note = "  (kept from an earlier build)" if blob.cached else ""
    number = counted(files, "file")
    console.say(f"  {name:<28.28}{number:>11} {megabytes(blob.size):>10}{note}")


class Scratch:
    """A layout being written next to its destination, or in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: (platform, patch layer) -> whether it came from the cache
        self.cached: dict[tuple[str, str], bool] = {}
        (root / "blobs" / "sha256").mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def add_layer(
        self,
        files: Mapping[str, Content | None],
        epoch: int,
        inputs: LayerInputs,
        owners: Owners | None = None,
    ) -> Blob:
        """Add a layer from absolute paths, or reuse the cached layer with the same inputs."""
        partial = self.root / "blobs" / "partial"
        owners = owners or Owners()
        key = layer_key(inputs, files, epoch, owners)
        with locked(f"layer {key}"):
            layer = take_cached_layer(key, partial)
            cached = layer is not None
            if layer is None:
                title, total = f"writing {'+'.join(inputs.names)}", content_bytes(files)
                with (
                    console.progress(title, total, leaves_line=False) as bar,
                    partial.open("wb") as out,
                ):
                    digest, diff_id, size = tar_layer(
                        out, files, epoch, owners, bar.advance, deflated
                    )
                layer = CachedLayer(digest, diff_id, size)
                cache_layer(key, layer, partial)
        partial.replace(self._path(layer.digest))
        self.cached |= {(inputs.platform, name): cached for name in inputs.names}
        return Blob(layer.digest, layer.size, OCI_LAYER_GZIP, layer.diff_id, cached)

    def add_json(self, value: object, media_type: str) -> Blob:
        """Add a JSON blob."""
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        digest = sha256_digest(data)
        self._path(digest).write_bytes(data)
        return Blob(digest, len(data), media_type)

    def add_manifest(self, value: object, media_type: str) -> RawManifest:
        """Add a manifest or an index."""
        blob = self.add_json(value, media_type)
        return RawManifest(data=self._path(blob.digest).read_bytes(), media_type=media_type)

    def finish(self, manifest: RawManifest, platform: Mapping[str, str], name: str) -> None:
        """Write ``index.json`` and ``oci-layout``; ``platform`` is empty for an index."""
        entry = {
            **manifest.descriptor.as_json(),
            **({"platform": dict(platform)} if platform else {}),
            "annotations": {"org.opencontainers.image.ref.name": name},
        }
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
        (self.root / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')


# ---------------------------------------------------------------------------------------- overlays
#
# They lie at the paths that they have in the image they are meant for.  Removed files stand in the
# receipts.


def write_overlay(scratch: Scratch, plan: BuildPlan) -> tuple[RawManifest, int]:
    """Write layers, configuration and manifest; returns the manifest and the layers' size."""
    epoch, created = plan.epoch, metadata.created(plan)
    written, history = [], []
    for name, files in image_layers(plan):
        blob = scratch.add_layer(files, epoch, LayerInputs.of(plan, [name]))
        say_layer(name, len(files), blob)
        written.append(blob)
        history.append({"created": created, "created_by": f"spark-build layer {name}"})
    config = scratch.add_json(
        {
            "architecture": plan.base.platform.architecture,
            "os": "linux",
            "created": created,
            "config": {
                "Env": [f"{k}={v}" for k, v in sorted(plan.env.items())],
                "Labels": metadata.labels(plan),
            },
            "rootfs": {"type": "layers", "diff_ids": [b.diff_id for b in written]},
            "history": history,
        },
        OCI_CONFIG,
    )
    manifest = scratch.add_manifest(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": baked.OVERLAY_TYPE,
            "config": config.descriptor(),
            "layers": [b.descriptor() for b in written],
            "annotations": metadata.labels(plan),
        },
        OCI_MANIFEST,
    )
    return manifest, sum(b.size for b in written)


def layout_digest(layout: Path, reference: str = "") -> str:
    """The manifest digest of the image of that name in a layout; ``""`` is the only one.

    Raises:
        UsageError: no single image is meant, or the directory is no layout.
    """
    try:
        return LayoutDirectory(layout).resolve(reference)
    except RemoteError as error:
        raise UsageError(f"{layout} is not an OCI layout: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """How an overlay goes onto the image that it is meant for."""

    base: str
    #: name of the image made from base and overlay
    image: str
    dockerfile: str
    #: the build command without the Dockerfile's path
    build: str

    def named(self, image: str) -> Overlay:
        """The same, for an image of another name."""
        old, new = (f" -t {shlex.quote(name)}" for name in (self.image, image))
        return replace(self, image=image, build=self.build.replace(old, new, 1))

    def command(self, dockerfile: Path | None = None) -> str:
        """The build command for a Dockerfile with that path."""
        return f"{self.build} - <{shlex.quote(str(dockerfile or 'Dockerfile'))}"


def overlay_of(plan: BuildPlan, built: BuiltImage) -> Overlay:
    """How an overlay that was built goes onto its image."""
    return overlay_onto(plan.document, metadata.labels(plan), built.subject)


def overlay_recipe(plan: BuildPlan, overlay: Ref) -> str:
    """The Dockerfile for an overlay: ``oci:DIR@DIGEST`` or an image name."""
    return overlay_onto(plan.document, metadata.labels(plan), overlay).dockerfile


def name_of_both(plan: PlanDocument) -> str:
    """Name of the image made from a plan's overlay and its base."""
    return f"spark-build/{plan.name}:{plan.base.packages['vllm'].replace('+', '-')}"


def overlay_onto(plan: PlanDocument, labels: Mapping[str, str], overlay: Ref) -> Overlay:
    """How to put an overlay (``oci:DIR@DIGEST`` or an image name) on its base image.

    A Dockerfile that copies files, then removes replaced files in one step and checks the others
    against their receipts.  Its labels mark it as built by spark-build, so it can be published.
    """
    base, image = f"vllm/vllm-openai:v{plan.base.packages['vllm']}", name_of_both(plan)
    finish = metadata.finish_command(plan.base.interpreter, plan.base.site_packages)
    source, words = overlay.place, ["docker", "buildx", "build", "--platform", plan.base.platform]
    if overlay.in_layout:
        folder, reference = layout_place(overlay)
        # some releases of buildx need a tag before a digest; the tag is ignored
        pinned = f":overlay@{reference}" if reference else ""
        source = "overlay"
        words += ["--build-context", f"overlay=oci-layout://{folder.absolute()}{pinned}"]
    build = shlex.join([*words, "-t", image])
    ours = {**labels, baked.BASE_LABEL: base, f"{baked.LABEL_PREFIX}.base-digest": ""}
    lines = [
        f"# {build} - <this file",
        f"FROM {base}",
        f"COPY --from={source} / /",
        f"RUN --network=none {json.dumps(finish)}",
        *(f"ENV {name}={quoted(value)}" for name, value in sorted(plan.env.items())),
        *(f"LABEL {quoted(name)}={quoted(value)}" for name, value in sorted(ours.items())),
    ]
    dockerfile = "\n".join(lines) + "\n"
    return Overlay(base=base, image=image, dockerfile=dockerfile, build=build)


def write_dockerfile(plan: BuildPlan, built: BuiltImage) -> Path | None:
    """Write the Dockerfile beside the overlay's layout; returns its path, None on failure."""
    if not plan.base.is_wheels or not built.ref.in_layout:
        return None
    layout = Path(built.ref.place).absolute()
    text = f"{_DOCKERFILE_START} {built.name}\n{overlay_of(plan, built).dockerfile}"
    path, other = _dockerfiles(layout, built.digest)
    if path.exists() and not _begins(path, f"{_DOCKERFILE_START} {built.name}\n"):
        path = other  # that one is of another overlay, or the user's
    try:
        write_atomically(path, text.encode())
    except UsageError as error:  # the image is there, and its Dockerfile is printed
        console.warn(str(error))
        return None
    return path


def find_dockerfile(layout: Path, digest: str) -> Path | None:
    """The Dockerfile of an overlay in a layout, if it still exists."""
    files = _dockerfiles(layout.absolute(), digest)
    ours = (path for path in files if _begins(path, _DOCKERFILE_START))
    return next((path for path in ours if f"@{digest}" in _text(path)), None)


#: First line of a Dockerfile written by spark-build.
_DOCKERFILE_START = "# spark-build: the image of the overlay"


def _dockerfiles(layout: Path, digest: str) -> tuple[Path, Path]:
    short = digest.removeprefix("sha256:")[:12]
    first, second = f"{layout.name}.Dockerfile", f"{layout.name}-{short}.Dockerfile"
    return layout.with_name(first), layout.with_name(second)


def _text(path: Path) -> str:
    """The text of a file that may be a Dockerfile; empty if it is none."""
    try:
        return read_regular(path, DOCUMENT).decode()
    except (OSError, ValueError):
        return ""


def _begins(path: Path, words: str) -> bool:
    return _text(path).startswith(words)


def _layout_blob(layout: Path, digest: str) -> bytes:
    try:
        path = layout / "blobs" / "sha256" / digest.removeprefix("sha256:")
        data = read_regular(path, DOCUMENT)
    except OSError as error:
        raise UsageError(f"{layout}: blob {digest} cannot be read: {reason(error)}") from None
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise UsageError(f"{layout}: blob {digest} is damaged")
    return data


def _refuse_damaged(layout: Path, digest: str) -> None:
    """Read a blob of any size, and compare its bytes with its name."""
    try:
        with open_regular(layout / "blobs" / "sha256" / digest.removeprefix("sha256:")) as blob:
            seen = hashlib.file_digest(blob, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{layout}: blob {digest} cannot be read: {reason(error)}") from None
    if f"sha256:{seen}" != digest:
        raise UsageError(f"{layout}: blob {digest} is damaged")


def _manifest_and_config(layout: Path, reference: str) -> tuple[RawManifest, ImageConfig]:
    digest = layout_digest(layout, reference)
    data = _layout_blob(layout, digest)
    raw = check_manifest(data, content_type="", digest=digest, where=f"{layout}: {digest}")
    if is_index(raw):  # which no overlay is
        return raw, ImageConfig()
    return raw, parse_config(_layout_blob(layout, blobs(raw)[0].digest), str(layout))


def labels_of_layout(layout: Path, reference: str = "") -> dict[str, str]:
    """The labels of an image in a layout.

    Raises:
        UsageError: the name does not identify a single image, or a blob is damaged.
    """
    return _manifest_and_config(layout, reference)[1].labels


def read_layout(
    layout: Path, reference: str = ""
) -> tuple[RecordedPlan, dict[str, bytes], dict[str, str]]:
    """An overlay layout as ``(plan, absolute path -> bytes, env)``.

    It is read like every other image, so what a runtime does not unpack is refused.

    Raises:
        UsageError: spark-build did not write the layout.
        RemoteError: it is malformed, or a blob is damaged.
    """
    image = find_image(LayoutDirectory(layout), reference, None)
    for layer in image.layers:  # an index of the same layer, damaged since, may be in the cache
        _refuse_damaged(layout, layer.digest)
    cache = LayerCache(image.source, diff_ids=image.diff_ids)
    with contextlib.closing(InLayers(image, Rootfs(image.layers, cache))) as opened:
        files = opened.all_files(str(layout))
    plan = files.get(f"{baked.SHARE}/plan.json")
    if plan is None:
        raise UsageError(f"{layout} was not made by spark-build: it has no plan")
    return baked.read_plan(plan, str(layout)), files, image.config.env


# ---------------------------------------------------------------------------------- patched images
#
# The base's layers keep their descriptors byte for byte, with any media type and compression.
# ``spark_apply.pyz finish`` deletes files inside an image; here the same decision is made from the
# image's layers, and the result is whiteouts.

# ------------------------------------------------------------------------------------ removed files


_CACHE = "__pycache__"


def removed_paths(tree: Tree, view: Rootfs, site: str, changes: Changes) -> list[str]:
    """Paths below ``site`` of the base's files and whole folders to remove."""
    copied = OverlayTree(_Seen(tree, view, site))
    copied.update({path: content for path, content in changes.items() if content is not None})
    final = final_digests(receipts_of(copied))
    folders = _Folders(view, site, changes)
    for path in leftovers(copied, final):
        if copied.digest(path) is not None and not folders.replaced(path):
            folders.remove(path)
    return folders.topmost()


class _Seen:
    """A site-packages directory with all names in it, of any distribution."""

    def __init__(self, tree: Tree, view: Rootfs, site: str) -> None:
        self._tree, self._view, self._site = tree, view, site

    def read(self, path: str) -> bytes | None:
        return self._tree.read(path)

    def digest(self, path: str) -> str | None:
        entry = self._view.stat(f"{self._site}/{path}")
        return entry.row.sha256 if entry is not None and entry.kind == FILE else None

    def mode(self, path: str) -> int:
        return self._tree.mode(path)

    def children(self, directory: str) -> list[str]:
        return self._view.names(f"{self._site}/{directory}".rstrip("/"))

    def distributions(self) -> dict[str, Distribution]:
        return self._tree.distributions()


class _Folders:
    """Names in the folders of site-packages during the removal."""

    def __init__(self, view: Rootfs, site: str, changes: Changes) -> None:
        self._view, self._site = view, site
        self._names: dict[str, set[str]] = {}
        self._new: dict[str, set[str]] = {}
        self._files = {path for path, content in changes.items() if content is not None}
        self._gone: set[str] = set()
        for path in self._files:
            while path:
                folder, _, name = path.rpartition("/")
                self._new.setdefault(folder, set()).add(name)
                path = folder

    def replaced(self, path: str) -> bool:
        """Whether a new file or folder replaces this path or a parent of it."""
        if path in self._new:
            return True
        while path:
            if path in self._files or path in self._gone:
                return True
            path = path.rpartition("/")[0]
        return False

    def names(self, folder: str) -> set[str]:
        """The current names in a folder."""
        if folder not in self._names:
            names = self._view.names(f"{self._site}/{folder}".rstrip("/"))
            self._names[folder] = set(names) | self._new.get(folder, set())
        return self._names[folder]

    def remove(self, path: str) -> None:
        """Remove a file, and parent folders that then have only caches."""
        self._drop(path)
        folder = path.rpartition("/")[0]
        while folder:
            names = self.names(folder)
            if _CACHE in names and not any(name.endswith(".py") for name in names):
                self._drop(f"{folder}/{_CACHE}")
            if names:
                return
            self._drop(folder)
            folder = folder.rpartition("/")[0]

    def _drop(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self.names(folder).discard(name)
        self._gone.add(path)

    def topmost(self) -> list[str]:
        """The removed paths, without those inside a removed folder."""
        return sorted(path for path in self._gone if not self._inside(path))

    def _inside(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        return bool(folder) and (folder in self._gone or self._inside(folder))


# ------------------------------------------------------------------------------------ the new image


Files = dict[str, "Content | None"]
#: Layers of an image in Docker's classic image store (``maxLayerDepth`` in moby's
#: ``layer/layer_store.go``: two more make a container of it, and overlay2 stacks 127).
_MOST_LAYERS = 125
#: Annotations (OCI image specification, "Pre-Defined Annotation Keys") that are not inherited.
_OF_THE_BASE = ("org.opencontainers.image.base.", "org.opencontainers.image.ref.name")


def write_patched(
    scratch: Scratch, request: BuildRequest, opened: InLayers
) -> tuple[RawManifest, int]:
    """Write layers, configuration and manifest; returns the manifest and the layers' size in bytes.

    Raises:
        UsageError: the base already has the maximum number of layers.
        BuildFailed: the base has a file where a folder is needed.
        RemoteError: the base's layers can no longer be read.
    """
    assert request.base is not None
    check_depth(opened)
    plan, view = request.plan, opened.view
    layers = _layers(plan, request.base.tree, view)
    groups = [[name] for name, _ in layers]
    single = plan.single_layer or len(opened.image.layers) + len(layers) > _MOST_LAYERS
    if single:
        if len(opened.image.layers) >= _MOST_LAYERS:
            console.warn(
                f"the base has {len(opened.image.layers)} layers; a Docker Engine with its classic "
                f"image store does not load images with more than {_MOST_LAYERS}"
            )
        merged: Files = {}
        for _, files in layers:
            merged.update(files)
        groups = [[name for name, _ in layers]]
        layers = [("+".join(groups[0]), merged)]
    epoch = plan.epoch
    owners = Owners(folder=_folders(view), files=metadata.restored(plan))
    blobs = []
    for (name, files), group in zip(layers, groups, strict=True):
        _check_places(files, view)
        blobs.append(scratch.add_layer(files, epoch, LayerInputs.of(plan, group), owners))
        say_layer(name, len(files), blobs[-1])
    config = _config(opened.image.config, plan, blobs, [name for name, _ in layers])
    manifest = _manifest(scratch, opened.image.manifest, plan, blobs, config)
    return manifest, sum(blob.size for blob in blobs)


def check_depth(opened: InLayers) -> None:
    """Refuse a base to which no layer can be added.

    Raises:
        UsageError: the base has as many layers as an engine can mount.
    """
    count = len(opened.image.layers)
    if count >= limits.LAYERS:
        raise UsageError(
            f"the base has {count} layers, and a container cannot have more than {limits.LAYERS} "
            "(overlayfs), so no layer can be added",
            hint="create a base with fewer layers, and name it with --base",
        )


def check_writable_base(plan: BuildPlan, base: Subject) -> None:
    """Read everything that :func:`write_patched` will read of a base, and write nothing.

    Raises:
        UsageError: the base already has the maximum number of layers.
        BuildFailed: the base has a file where a folder is needed.
        RemoteError: the base's layers can no longer be read.
    """
    if base.in_layers is None:
        return
    check_depth(base.in_layers)
    view = base.in_layers.view
    folder = _folders(view)
    for _, files in _layers(plan, base.tree, view):
        _check_places(files, view)
        for _, path, content in layer_entries(files):
            if content == "dir":
                folder(path)


def _layers(plan: BuildPlan, tree: Tree, view: Rootfs) -> list[tuple[str, Files]]:
    """New files layer by layer; removals, of what the base's tree has, are in the last layer."""
    site = plan.base.site_packages
    layers: list[tuple[str, Files]] = []
    for name, files in image_layers(plan):
        layers.append((name, {path: file for path, file in files.items() if file is not None}))
    gone = {
        metadata.placed(f"{site}/{p}", plan.base.links) for p, c in plan.changes.items() if not c
    }
    for _, files in layers:  # added by one layer, removed by a later one
        for path in gone & files.keys():
            del files[path]
    for path in removed_paths(tree, view, site, plan.changes):
        layers[-1][1][metadata.placed(f"{site}/{path}", plan.base.links)] = None
    return layers


def _folders(view: Rootfs) -> Callable[[str], Sequence[int]]:
    """Mode and owner of the base's folders, which new entries must keep."""
    known: dict[str, Sequence[int]] = {}

    def folder(path: str) -> Sequence[int]:
        if path not in known:
            entry = view.lstat(path)
            if entry is not None and entry.kind != DIR:
                raise BuildFailed(f"the base has a {entry.kind} at {path}, where a folder must be")
            row = None if entry is None else entry.row
            known[path] = FOLDER if row is None else (row.mode, row.uid, row.gid)
        return known[path]

    return folder


def _check_places(files: Files, view: Rootfs) -> None:
    for path, content in files.items():
        entry = view.lstat(path) if content is not None else None
        if entry is not None and entry.kind == DIR:
            raise BuildFailed(f"the base has a folder at {path}, where a file must be")


def _config(
    base: ImageConfig,
    plan: BuildPlan,
    blobs: Sequence[Blob],
    names: Sequence[str],
) -> ImageConfig:
    """The base's configuration with added layers, variables and labels; the rest is unchanged."""
    document, diff_ids, created = base.document, base.diff_ids or (), metadata.created(plan)
    changed: dict[str, object] = {
        "created": created,
        "config": {
            **base.settings,
            "Env": merged_env(base.env_lines, plan.env),
            "Labels": {**base.labels, **metadata.labels(plan)},
        },
        "rootfs": {**document["rootfs"], "diff_ids": [*diff_ids, *(b.diff_id for b in blobs)]},
    }
    with_files = [step for step in base.history if not step.empty_layer]
    if len(with_files) == len(diff_ids):  # else it is no history of these layers
        steps = [{"created": created, "created_by": f"spark-build layer {name}"} for name in names]
        changed["history"] = [*(document.get("history") or []), *steps]
    return ImageConfig({**document, **changed})


def merged_env(env: Sequence[str], new: Mapping[str, str]) -> list[str]:
    """``NAME=value`` lines with new values; existing variables keep their position."""
    left = dict(new)
    lines = []
    for line in env:
        name = line.partition("=")[0]
        lines.append(f"{name}={left.pop(name)}" if name in left else line)
    return lines + [f"{name}={value}" for name, value in sorted(left.items())]


def _manifest(
    scratch: Scratch,
    base: RawManifest,
    plan: BuildPlan,
    blobs: Sequence[Blob],
    config: ImageConfig,
) -> RawManifest:
    """The base's manifest, in Docker's or OCI's format as before, with the new layers appended."""
    was = base.json()
    docker = base.media_type == DOCKER_MANIFEST
    layer_type = DOCKER_LAYER_GZIP if docker else OCI_LAYER_GZIP
    added = scratch.add_json(config.document, str(was["config"]["mediaType"]))
    value: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": base.media_type,
        "config": added.descriptor(),
        "layers": [
            *was["layers"],
            *({**blob.descriptor(), "mediaType": layer_type} for blob in blobs),
        ],
    }
    if not docker:  # whose manifests have no annotations
        value["annotations"] = merged_annotations(base, plan)
    return scratch.add_manifest(value, base.media_type)


def merged_annotations(base: RawManifest, plan: BuildPlan) -> dict[str, str]:
    """The base's annotations, with ours added or replaced.

    Annotations about the base's own name and base are dropped.
    """
    annotations = base.json().get("annotations")
    inherited = {
        name: value
        for name, value in (annotations.items() if isinstance(annotations, dict) else ())
        if isinstance(value, str) and not name.startswith(_OF_THE_BASE)
    }
    return dict(sorted({**inherited, **metadata.labels(plan)}.items()))


# ---------------------------------------------------------------------------------------- delivery
#
# An engine gets it as a stream, like ``docker load``.


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What to write, and where.  ``write`` returns the manifest and the size of new layers."""

    write: Callable[[Scratch], tuple[RawManifest, int]]
    tag: str
    output: Path | None
    push: bool
    #: where the base's manifests and blobs are; None for an image without a base
    base: ImageSource | None = None
    #: connections to the base's registry, if there is one
    locations: Locations | None = None
    thin: bool = False
    platform: Mapping[str, str] = field(default_factory=dict)


def deliver(delivery: Delivery) -> BuiltImage:
    """Write the image and deliver it; a failure leaves the destination unchanged.

    Raises:
        UsageError: the destination is not writable.
        BuildFailed: the disk is full, or the Docker Engine rejects it.
        RemoteError: a registry failed; no tag was moved.
    """
    cached: dict[tuple[str, str], bool] = {}

    def write(scratch: Scratch) -> tuple[RawManifest, int]:
        built = delivery.write(scratch)
        cached.update(scratch.cached)
        return built

    return replace(_deliver(replace(delivery, write=write)), cached=cached)


def _deliver(delivery: Delivery) -> BuiltImage:
    if delivery.output is not None:
        return _to_layout(delivery, delivery.output)
    if not delivery.push:
        docker.connect().close()  # before anything is written, because it may not be there
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder, _disk(Path(folder)):
        scratch = Scratch(Path(folder) / "layout")
        if delivery.push:
            return _to_registry(delivery, scratch)
        manifest, added = delivery.write(scratch)
        source = _source(scratch.root, delivery)
        return _to_docker(delivery, source, manifest, added)


def _source(scratch: Path, delivery: Delivery) -> ImageSource:
    """The new image as a source for copies."""
    own = LayoutDirectory(scratch)
    return own if delivery.base is None else FallbackSource(own, delivery.base)


def _to_registry(delivery: Delivery, scratch: Scratch) -> BuiltImage:
    """Write the image; push missing blobs, then the manifests, and the tag last."""
    from builder.images.registry.copy import Locations, ask_tag, copy_image

    with contextlib.ExitStack() as stack:
        locations = delivery.locations or stack.enter_context(Locations())
        place = locations.open(Ref(delivery.tag))
        tagged = ask_tag(place)
        manifest, added = delivery.write(scratch)
        source = _source(scratch.root, delivery)
        copy_image(source, manifest.digest, place.image, place.reference, tagged=tagged)
    if not is_index(manifest):
        _remember(source, manifest)
    return BuiltImage(
        ref=Ref(delivery.tag),
        digest=manifest.digest,
        added_bytes=added,
        engine="oci",
        target=Ref(f"docker://{delivery.tag}@{manifest.digest}"),
    )


def _remember(source: ImageSource, manifest: RawManifest) -> None:
    """Index our own layers now, because verification will look them up by digest."""
    own = source.own if isinstance(source, FallbackSource) else source
    cache = LayerCache(own)
    for layer in blobs(manifest)[1:]:
        if isinstance(own, LayoutDirectory) and own.has(layer.digest):
            cache.index(layer).close()


def _to_docker(
    delivery: Delivery, source: ImageSource, manifest: RawManifest, added: int
) -> BuiltImage:

    if is_index(manifest):
        raise UsageError(
            "an image for several platforms must go into a registry or a layout",
            hint="--output oci:DIR",
        )
    digest = load_image(source, manifest, delivery.tag)
    return BuiltImage(ref=Ref(delivery.tag), digest=digest, added_bytes=added, engine="oci")


def _to_layout(delivery: Delivery, output: Path) -> BuiltImage:
    from builder.images.registry.copy import copy_image

    target = output.absolute()
    base = delivery.base
    if isinstance(base, LayoutDirectory) and base.path.resolve() == target.resolve():
        raise UsageError(
            f"{target} contains the base image, so it cannot be the output too",
            hint="--output oci:DIR",
        )
    with new_layout(output, delivery.tag) as layout:
        scratch = Scratch(layout)
        manifest, added = delivery.write(scratch)
        if delivery.base is not None and not delivery.thin:
            source = _source(layout, delivery)
            copy_image(source, manifest.digest, LayoutWriter(layout, target), manifest.digest)
        scratch.finish(manifest, delivery.platform, delivery.tag)
    ref = Ref(delivery.tag)
    built = BuiltImage(ref=ref, digest=manifest.digest, added_bytes=added, engine="oci")
    return in_layout(built, output)


def in_layout(built: BuiltImage, output: Path) -> BuiltImage:
    """An image in a layout, which may have other images."""
    ref = Ref(f"oci:{output}")
    return replace(built, ref=ref, name=built.ref.text, target=Ref(f"{ref}@{built.digest}"))


@contextlib.contextmanager
def new_layout(output: Path, name: str) -> Iterator[Path]:
    """A temporary layout for one image, which is added to ``output`` on success.

    Raises:
        UsageError: ``output`` is something else.
        RemoteError: ``output`` is a layout with a damaged index.
        BuildFailed: the disk is full or not writable.
    """
    target = output.absolute()
    with _disk(target):
        check_layout_target(target)
        with work_folder(target) as work:
            yield work / "layout"
            add_image(work / "layout", target, name)


@contextlib.contextmanager
def _disk(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildFailed(
            f"cannot write {target}: {error.strerror}; no partial output was left",
            hint=os_hint(error, OUTPUT),
        ) from error


# ----------------------------------------------------------------------------- into a Docker Engine


_BLOCK = 512


def load_image(source: ImageSource, manifest: RawManifest, tag: str) -> str:
    """Load an image under a tag; returns its ID in the engine.

    Layers that the engine already has are not sent.  With the containerd image
    store the ID is the manifest's digest.

    Raises:
        EngineError: no Docker Engine responds.
        BuildFailed: the engine rejects it.
        RemoteError: a blob of the base cannot be read.
    """
    import requests
    from docker.errors import DockerException

    client = docker.connect()
    try:
        diff_ids = read_config(source, manifest).diff_ids or ()
        known = _known_layers(client, diff_ids)
        if known:
            with contextlib.suppress(DockerException, requests.RequestException):
                return _load(client, archive(source, manifest, tag, skip=known), tag, diff_ids)
            # the engine needs all of them
        return _load(client, archive(source, manifest, tag), tag, diff_ids)
    except (DockerException, requests.RequestException) as error:
        words = getattr(error, "explanation", None) or error.__class__.__name__
        raise BuildFailed(f"{tag}: the Docker Engine cannot load it: {words}") from None
    finally:
        client.close()


def _load(client: DockerClient, tar: Iterator[bytes], tag: str, diff_ids: Sequence[str]) -> str:
    from docker.errors import ImageLoadError

    client.images.load(cast("Any", tar))
    image = client.images.get(tag)
    if image.attrs["RootFS"]["Layers"] != list(diff_ids):
        raise ImageLoadError(f"{tag} was loaded with different layers")
    return str(image.id)


def _known_layers(client: DockerClient, diff_ids: Sequence[str]) -> int:
    """The number of lowest layers that the engine already has in some image."""
    from docker.errors import DockerException

    best = 0
    try:
        for image in client.images.list():
            present = image.attrs.get("RootFS", {}).get("Layers") or []
            pairs = enumerate(zip(present, diff_ids, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(present), len(diff_ids)))
            best = max(best, same)
    except DockerException:
        return 0
    return best


def archive(
    source: ImageSource, manifest: RawManifest, tag: str, *, skip: int = 0
) -> Iterator[bytes]:
    """The tar for ``docker load``: an OCI layout, with Docker's older ``manifest.json``.

    The first ``skip`` layers are left out.
    """
    config, *layers = blobs(manifest)
    named = {
        "io.containerd.image.name": _full_name(tag),
        "org.opencontainers.image.ref.name": tag.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [{**manifest.descriptor.as_json(), "annotations": named}],
    }
    older = {
        "Config": _path(config),
        "RepoTags": [tag],
        "Layers": [_path(layer) for layer in layers],
    }
    yield from _file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    yield from _file("index.json", json.dumps(index).encode())
    yield from _file("manifest.json", json.dumps([older]).encode())
    yield from _file(_path(manifest.descriptor), manifest.data)
    sent = {layer.digest for layer in layers[:skip]}
    for blob in (config, *layers):
        if blob.digest not in sent:
            sent.add(blob.digest)
            yield from _blob(source, blob)
    yield bytes(2 * _BLOCK)


def _full_name(tag: str) -> str:
    from builder.images.registry.reference import parse_reference

    return str(parse_reference(tag))


def _path(blob: Descriptor) -> str:
    return f"blobs/sha256/{blob.digest.removeprefix('sha256:')}"


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT if size < 8 << 30 else tarfile.GNU_FORMAT)


def _file(name: str, data: bytes) -> Iterator[bytes]:
    yield _header(name, len(data)) + data + bytes(-len(data) % _BLOCK)


def _blob(source: ImageSource, blob: Descriptor) -> Iterator[bytes]:
    yield _header(_path(blob), blob.size)
    with source.open(blob) as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk
    yield bytes(-blob.size % _BLOCK)


# -------------------------------------------------------------------------------------- the engine


class OciEngine:
    """Writes layers, configuration and manifest, and brings them where they should be."""

    name = "oci"

    def missing(self) -> str | None:
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        return refuses_base(plan)

    def render(self, plan: BuildPlan) -> str:
        """The Dockerfile lines with which the overlay goes onto an image, or its equivalent."""
        if plan.base.is_wheels:
            return overlay_recipe(plan, Ref("oci:OVERLAY"))
        lines = [f"FROM {plan.base.ref.partition('@')[0]}@{plan.base.digest}"]
        for name, files in image_layers(plan):
            lines.append(f"# layer {name}: {sum(f is not None for f in files.values())} files")
        lines += [f"ENV {name}={quoted(value)}" for name, value in sorted(plan.env.items())]
        lines += [
            f"LABEL {quoted(name)}={quoted(value)}" for name, value in metadata.labels(plan).items()
        ]
        return "\n".join(lines) + "\n"

    def needs(self, request: BuildRequest) -> list[Need]:
        added, base = added_bytes(request.plan), base_bytes(request)
        if request.output is not None:
            needs = [Need.output(request.output, added, "the new layers, uncompressed")]
            if base and not request.thin:
                needs.append(Need.output(request.output, base, "the base's layers"))
            return needs
        needs = [Need.temporary(added, "the new layers, uncompressed")]
        return needs if request.push else needs + load_needs(added)

    def build(self, request: BuildRequest) -> BuiltImage:
        plan = request.plan
        if plan.base.is_wheels:
            return deliver(
                Delivery(
                    write=lambda scratch: write_overlay(scratch, plan),
                    tag=request.tag,
                    output=request.output,
                    push=request.push,
                    platform={"architecture": plan.base.platform.architecture, "os": "linux"},
                )
            )
        opened = opened_of(request)
        return deliver(
            Delivery(
                write=lambda scratch: write_patched(scratch, request, opened),
                tag=request.tag,
                output=request.output,
                push=request.push,
                base=opened.image.source,
                locations=opened.image.locations,
                thin=request.thin,
                platform=opened.image.config.platform,
            )
        )


def opened_of(request: BuildRequest) -> InLayers:
    """The base's image.

    Raises:
        UsageError: a Docker Engine has read it, so that its layers are not at hand.
    """
    if request.base is None or request.base.in_layers is None:
        raise UsageError(
            f"{request.plan.base.ref} was read through a Docker Engine, but the oci engine reads "
            f"only registries and layouts",
            hint=f"--base docker://{request.plan.base.ref}",
        )
    return request.base.in_layers


def base_bytes(request: BuildRequest) -> int:
    """Packed bytes of the base's layers, where they are at hand and not in the output already."""
    opened = None if request.base is None else request.base.in_layers
    if opened is None:
        return 0
    there = None if request.output is None else LayoutDirectory(request.output)
    absent = (d for d in opened.image.layers if there is None or not there.has(d.digest))
    return sum(layer.size for layer in absent)


def load_needs(size: int) -> list[Need]:
    """What the Docker Engine needs for new files of so many bytes: as layers, and unpacked."""
    try:
        client = docker.connect()
    except EngineError:  # which the build will say
        return []
    try:
        return engine_needs(client, 2 * size, "the new layers, and unpacked")
    finally:
        client.close()


# -------------------------------------------------------------------------------- several platforms


#: BuildKit's annotation for the subject of an attestation.
_ABOUT = "vnd.docker.reference.digest"


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """A new index: one request for each patched entry."""

    requests: tuple[BuildRequest, ...]
    tag: str
    keep: bool = False
    output: Path | None = None
    push: bool = False
    thin: bool = False


@dataclass(frozen=True)
class BuiltIndex:
    """The index, and the digests of patched manifests by the digests that they replace."""

    image: BuiltImage
    digests: dict[str, str]


def build_index(request: IndexRequest) -> BuiltIndex:
    """Build every entry and the index, and deliver it.

    Raises:
        UsageError, BuildFailed, RemoteError: see ``deliver``.
    """
    digests: dict[str, str] = {}

    def write(scratch: Scratch) -> tuple[RawManifest, int]:
        return _write(scratch, request, digests)

    image = opened_of(request.requests[0]).image
    built = deliver(
        Delivery(
            write=write,
            tag=request.tag,
            output=request.output,
            push=request.push,
            base=image.source,
            locations=image.locations,
            thin=request.thin,
        )
    )
    return BuiltIndex(built, digests)


def _write(
    scratch: Scratch, request: IndexRequest, digests: dict[str, str]
) -> tuple[RawManifest, int]:
    new: dict[str, RawManifest] = {}
    added = 0
    for single in request.requests:
        opened = opened_of(single)
        manifest, size = write_patched(scratch, single, opened)
        new[opened.image.manifest.digest] = manifest
        added += size
    digests.update({was: manifest.digest for was, manifest in new.items()})
    top = opened_of(request.requests[0]).image.top
    listed = {entry.digest for entry in entries(top)}
    if not listed >= new.keys():
        raise UsageError(f"{request.requests[0].plan.base.ref} has indexes in its index")
    value: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": top.media_type,
        "manifests": _entries(top, new, keep=request.keep),
    }
    if top.media_type == OCI_INDEX:
        value["annotations"] = merged_annotations(top, request.requests[0].plan)
    return scratch.add_manifest(value, top.media_type), added


def _entries(top: RawManifest, new: dict[str, RawManifest], *, keep: bool) -> list[Any]:
    """The base's entries in their order: patched ones replaced, others kept or left out."""
    rows = []
    for entry, raw in zip(entries(top), top.json()["manifests"], strict=True):
        if entry.digest in new:
            replaced = new[entry.digest].descriptor.as_json()
            rows.append({**replaced, "platform": dict(entry.platform)})
        elif keep and entry.annotations.get(_ABOUT) not in new:
            rows.append(raw)
    return rows
