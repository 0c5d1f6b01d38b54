"""Compares an image in a Docker Engine with its rebuild: by digest, else file by file.

An engine gives no access to an image's original layers, only to its files.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from builder.engines import docker
from builder.engines.metadata import SHARE, read_layers
from builder.publish.subject import Baked, version_in
from builder.rebuild.compare import Difference, by_variable, byte_range, compare_documents
from builder.rebuild.run import OUR_STEP
from builder.rootfs.layers import LayerCache
from builder.rootfs.tar import FILE
from builder.rootfs.view import Rootfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from docker.models.containers import Container

    from builder.model.plan import BuildPlan
    from builder.publish.sources import EngineImage
    from builder.rebuild.compare import ComparedImage

_SETTINGS = ("Env", "Labels", "Entrypoint", "Cmd", "User", "WorkingDir")


class EngineOriginal:
    """An image in a Docker Engine to reproduce."""

    def __init__(self, opened: EngineImage) -> None:
        self._opened = opened
        self.digest = str(opened.image.id)

    @cached_property
    def baked(self) -> Baked:
        """The baked metadata."""
        with self._container() as container:
            layers = docker.read_file(container, f"{SHARE}/layers.json")
            metadata = docker.read_file(container, "/workspace/build-metadata.yaml")
        return Baked(
            version=version_in(metadata or b""),
            recorded=self._opened.recorded,
            layers=tuple(read_layers(layers, self.digest)),
            files={},
        )

    def _container(self) -> Any:
        return docker.created(self._opened.client, self.digest)

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:
        """No differences if the engine has the image under a digest of the rebuilt one.

        Raises:
            RemoteError: a rebuilt layer cannot be read.
        """
        if set(self._opened.digests) & set(rebuilt.image.digests):
            return []
        found = self._settings(rebuilt)
        added = sum(step.created_by.startswith(OUR_STEP) for step in rebuilt.image.settings.history)
        view = Rootfs(rebuilt.image.layers[-added:], LayerCache(rebuilt.source))
        try:
            with self._container() as container:
                found += [*_files(container, view), *_gone(container, plan)]
        finally:
            view.close()
        if not found:
            what = (
                "every file and setting is the same; only the tars were written by another builder"
            )
            found.append(Difference(blob=self.digest, where="layers", what=what))
        return found

    def _settings(self, rebuilt: ComparedImage) -> list[Difference]:
        new = rebuilt.image.settings.settings
        old = self._opened.image.attrs.get("Config") or {}
        return compare_documents(_plain(old), _plain(new), f"config {self.digest}")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Relevant settings; engines write defaults as missing, as null or as a value."""
    named = by_variable(settings)
    return {key: named.get(key) for key in _SETTINGS if named.get(key) not in (None, "", "/")}


def _files(container: Container, view: Rootfs) -> Iterator[Difference]:
    for path, entry in sorted(view.below("/").items()):
        if entry.kind != FILE:
            continue
        held, new = docker.read_file(container, f"/{path}"), view.read(f"/{path}")
        if held is None:
            yield Difference(blob="files", where=f"/{path}", what="not in the image")
        elif held != new:
            yield Difference(blob="files", where=f"/{path}", what=byte_range(held, new))


def _gone(container: Container, plan: BuildPlan) -> Iterator[Difference]:
    """Files of the base that the plan removes."""
    if not plan.base.is_image:
        return
    for path, content in plan.changes.items():
        place = f"{plan.base.site_packages}/{path}"
        if content is None and docker.read_file(container, place) is not None:
            yield Difference(blob="files", where=place, what="not in the rebuilt one")
