"""A base that is an image in a registry or OCI layout, identified by reading its layers.

It is not pulled: the layers are streamed once, newest first, as far as needed, and the results
are cached by layer digest.  The result is the same as that of the probe that runs in the image in a
Docker Engine (``probes/identify_probe.py``).
"""

from __future__ import annotations

import dataclasses
import email.parser
from typing import TYPE_CHECKING, Any

from builder.applier.trees import distribution_of
from builder.common.model.platform import Platform
from builder.errors import UsageError
from builder.images.bases.imagetree import ImageFacts, Survey, image_base
from builder.images.bases.records import recorded
from builder.images.bases.released import ReleasedFiles
from builder.images.rootfs.base import OpenedImage
from builder.images.rootfs.facts import RecordedFiles
from builder.images.rootfs.image import open_image
from builder.images.rootfs.layers import LayerCache
from builder.images.rootfs.python import interpreters
from builder.images.rootfs.tar import DIR, FILE, SYMLINK
from builder.images.rootfs.view import Rootfs
from builder.probes import identify_probe as probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from builder.images.bases.model import BaseRequest, FactsOf
    from builder.images.rootfs.base import Base
    from builder.images.rootfs.image import Image
    from builder.images.rootfs.python import Interpreter
    from builder.images.rootfs.view import Entry


def identify_remote(request: BaseRequest, ref: str) -> Base:
    """Identify an image by its layers; ``ref`` is what the plan calls it.

    Raises:
        RemoteError: the image does not exist, or a layer cannot be read or is malformed.
        UsageError: the image has no vLLM that can be patched.
    """
    opened = with_files(
        open_image(request.ref, request.platform), request.facts_of, noting=request.noting
    )
    try:
        return identify_opened(request, opened, ref)
    except BaseException:
        opened.close()
        raise


def with_files(image: Image, facts_of: FactsOf, *, noting: bool = False) -> OpenedImage:
    """An open image with its files; closed on failure.

    Raises:
        RemoteError: it has too many layers.
        SparkBuildError: the lock's data for it cannot be used (exit 9).
    """
    try:
        notes = RecordedFiles([layer.digest for layer in image.layers]) if noting else None
        facts = facts_of(image.layers)
        cache = LayerCache(image.source, diff_ids=image.diff_ids)
        return OpenedImage(image, Rootfs(image.layers, cache, facts, notes))
    except BaseException:
        image.close()
        raise


def identify_opened(request: BaseRequest, opened: OpenedImage, ref: str) -> Base:
    """Identify an open image; closing the base closes it."""
    return known_base(request, opened, ref, survey_image(request, opened, ref))


def survey_image(request: BaseRequest, opened: OpenedImage, ref: str) -> Survey:
    """The survey of an image by its layers, for :func:`known_base`."""
    image, view = opened.image, opened.view
    config = image.config
    for python in interpreters(view, config.env, config.working_directory):
        found = _distributions(view, python, request.tracked)
        if "vllm" in found:
            break
    else:
        raise UsageError(f"image {ref} has no Python with vllm")
    site = found["vllm"][0]
    tops: dict[str, bool] = {}
    for name, (root, _, owned) in found.items():
        if root == site:
            tops.update(dict.fromkeys(owned, bool(probe.HASH_ALL.match(name))))
    files = probe.survey(_LayerDisk(view), site, tops)
    return Survey(
        interpreter=python.command,
        python=python.version,
        machine=config.architecture,
        site_packages=site,
        packages={name: version for name, (_, version, _) in found.items()},
        roots={name: root for name, (root, _, _) in found.items()},
        **{**files, "files": {path: tuple(facts) for path, facts in files["files"].items()}},
    )


def known_base(request: BaseRequest, opened: OpenedImage, ref: str, survey: Survey) -> Base:
    """A base from an earlier survey of the same image, without reading layers.

    A requested file comes from the cache, else from the released wheel that
    has the same bytes, else from its layer.
    """
    image = opened.image
    facts = ImageFacts(
        ref=ref,
        digest=image.top.digest,
        config=image.config,
        created=image.config.created,
    )

    source = ReleasedFiles(
        opened.view,
        survey.site_packages,
        survey.files,
        survey.packages,
        Platform.parse(survey.machine, survey.python),
        request.index,
    )
    base = image_base(facts, survey, source, opened.close)
    return dataclasses.replace(base, opened=opened)


def _distributions(
    view: Rootfs, python: Interpreter, tracked: Iterable[str]
) -> dict[str, tuple[str, str, set[str]]]:
    """For each tracked distribution that an interpreter finds: root, version, top-level names."""
    wanted, found = set(tracked), {}
    for folder in python.path:
        root = view.realpath(folder)
        if root is None:
            continue
        for info in view.names(root):
            dist = distribution_of(info)
            if dist is None or dist.name not in wanted or dist.name in found:
                continue
            metadata = view.read(f"{root}/{info}/METADATA")
            if metadata is not None:
                record = view.read(f"{root}/{info}/RECORD")
                owned = probe.top_levels(recorded(record, f"{root}/{info}"))
                found[dist.name] = (root, _version_in(metadata, f"{root}/{info}"), owned)
    return found


def _version_in(metadata: bytes, where: str) -> str:
    headers = email.parser.BytesParser().parsebytes(metadata, headersonly=True)
    version = str(headers["Version"] or "")
    if not version:
        raise UsageError(f"{where}/METADATA has no version")
    return version


class _LayerDisk:
    """The file system of an image, for the probe's survey."""

    def __init__(self, view: Rootfs) -> None:
        self._view = view

    def files(self, top: str, hash_all: bool) -> Iterator[tuple[str, list[Any]]]:  # noqa: ARG002
        start = self._view.stat(top)
        if start is None:
            return
        if start.kind == FILE:
            yield top, _described(start)
        elif start.kind == DIR:
            real = self._view.realpath(top)
            assert real is not None
            for path, entry in self._view.below(real).items():
                seen = self._view.stat(f"{real}/{path}") if entry.kind == SYMLINK else entry
                if seen is not None and seen.kind == FILE:
                    yield f"{top}/{path}", _described(seen)

    def owner(self, path: str) -> list[int] | None:
        entry = self._view.stat(path)
        return None if entry is None else [entry.row.mode, entry.row.uid, entry.row.gid]

    def realpath(self, path: str) -> str:
        known, rest = path, ""
        while known not in ("", "/"):
            real = self._view.realpath(known)
            if real is not None:
                return real.rstrip("/") + rest
            known, _, name = known.rpartition("/")
            rest = f"/{name}{rest}"
        return path


def _described(entry: Entry) -> list[Any]:
    row = entry.row
    return [row.size, row.mode, row.sha256 or None, row.uid, row.gid]
