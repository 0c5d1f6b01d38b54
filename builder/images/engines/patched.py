"""Adds patch layers to an image: new layers, configuration and manifest.

The base's layers keep their descriptors byte for byte, with any media type and compression.
``spark_apply.pyz finish`` deletes files inside an image; here the same decision is made from the
image's layers, and the result is whiteouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.applier.finishing import leftovers
from builder.applier.receipts import final_digests, receipts_of
from builder.applier.trees import OverlayTree
from builder.common.console import console
from builder.errors import BuildFailed, UsageError
from builder.images.engines import metadata
from builder.images.engines.layers import FOLDER, LayerInputs, Owners, entries, say_layer
from builder.images.engines.metadata import image_layers
from builder.images.engines.model import BuildRequest
from builder.images.registry.model import (
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_LAYER_GZIP,
    ImageConfig,
)
from builder.images.rootfs import limits
from builder.images.rootfs.tar import DIR, FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.trees import Changes, Content, Distribution, Tree
    from builder.common.model.plan import BuildPlan
    from builder.images.engines.layers import Blob, Scratch
    from builder.images.registry.model import RawManifest
    from builder.images.rootfs.base import Base, InLayers
    from builder.images.rootfs.view import Rootfs

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
            found = self._view.names(f"{self._site}/{folder}".rstrip("/"))
            self._names[folder] = set(found) | self._new.get(folder, set())
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
    layers = _layers(request, view)
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
        UsageError: that.
    """
    count = len(opened.image.layers)
    if count >= limits.LAYERS:
        raise UsageError(
            f"the base has {count} layers, and a container cannot have more than {limits.LAYERS} "
            "(overlayfs), so no layer can be added",
            hint="create a base with fewer layers, and name it with --base",
        )


def check_writable_base(plan: BuildPlan, base: Base) -> None:
    """Read everything that :func:`write_patched` will read of a base, and write nothing.

    Raises:
        UsageError: the base already has the maximum number of layers.
        BuildFailed: the base has a file where a folder is needed.
        RemoteError: the base's layers can no longer be read.
    """
    if base.opened is None:
        return
    check_depth(base.opened)
    view = base.opened.view
    folder = _folders(view)
    for _, files in _layers(BuildRequest(plan=plan, tag="", base=base), view):
        _check_places(files, view)
        for _, path, content in entries(files):
            if content == "dir":
                folder(path)


def _layers(request: BuildRequest, view: Rootfs) -> list[tuple[str, Files]]:
    """New files layer by layer; removals are in the last layer."""
    assert request.base is not None
    plan, site = request.plan, request.plan.base.site_packages
    layers: list[tuple[str, Files]] = []
    for name, files in image_layers(plan):
        layers.append((name, {path: file for path, file in files.items() if file is not None}))
    gone = {
        metadata.placed(f"{site}/{p}", plan.base.links) for p, c in plan.changes.items() if not c
    }
    for _, files in layers:  # added by one layer, removed by a later one
        for path in gone & files.keys():
            del files[path]
    for path in removed_paths(request.base.tree, view, site, plan.changes):
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
    made_layers = [step for step in base.history if not step.empty_layer]
    if len(made_layers) == len(diff_ids):  # else it is no history of these layers
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
    held = base.json().get("annotations")
    kept = {
        name: value
        for name, value in (held.items() if isinstance(held, dict) else ())
        if isinstance(value, str) and not name.startswith(_OF_THE_BASE)
    }
    return dict(sorted({**kept, **metadata.labels(plan)}.items()))
