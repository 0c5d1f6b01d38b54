"""A base that is an image: in a Docker Engine, in a registry, or in an OCI layout.

In an engine, code that runs in the image identifies it: interpreter, site-packages path, versions
and hashes come from the image; nothing is assumed about Python 3.12 or /usr/local.  Elsewhere it is
not pulled: its layers are streamed once, newest first, as far as needed, and the results are cached
by layer digest.  The result is the same as that of ``probes/identify_probe.py`` in the image.
"""

from __future__ import annotations

import email.parser
import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from builder.applier.receipts import parse_record
from builder.applier.trees import distribution_of
from builder.applier.values import ApplyError, sha256_hex
from builder.common.console import console
from builder.common.plan import Platform
from builder.common.programs import IDENTIFY, IN_CONTAINER
from builder.common.wheels import RemoteWheel
from builder.errors import BuildFailed, EngineError, RemoteError, SparkBuildError, UsageError
from builder.images.bases.imagetree import (
    ImageFacts,
    Survey,
    check_vllm,
    image_base,
    recorded,
    survey_of,
)
from builder.images.engines import baked, docker
from builder.images.rootfs.facts import RecordedFiles
from builder.images.rootfs.image import LayerCache, open_image
from builder.images.rootfs.index import is_text
from builder.images.rootfs.tar import DIR, FILE, SYMLINK
from builder.images.rootfs.view import InLayers, Rootfs, interpreters
from builder.probes import identify_probe as probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image as EngineImageModel

    from builder.applier.layers import Layer
    from builder.common.plan import RecordedPlan
    from builder.common.pypi import PackageIndex
    from builder.images.bases.imagetree import FileFacts
    from builder.images.rootfs.image import Image
    from builder.images.rootfs.view import Entry, Interpreter
    from builder.images.subject import BaseRequest, FactsOf, OpenImage, Subject


# ------------------------------------------------------------------------------- in a Docker Engine


#: Interpreters to try, in order, until one has vLLM; needs only a shell in the image.
_FIND_PYTHON = f"""
for python in "${{VIRTUAL_ENV:-/nonexistent}}/bin/python" python3 python /opt/venv/bin/python3 \
    /usr/local/bin/python3 /usr/bin/python3; do
  command -v "$python" >/dev/null 2>&1 || continue
  "$python" -c 'import importlib.metadata as m; m.version("vllm")' >/dev/null 2>&1 || continue
  exec "$python" -B {IN_CONTAINER}
done
exit 97
"""


#: Empty files that a Docker Engine adds to every container that it creates.
_OF_ENGINE = {
    "/.dockerenv", "/dev/console", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class InEngine:
    """An open image in a Docker Engine: its files are read from a container that never starts."""

    client: DockerClient
    image: EngineImageModel
    _stack: ExitStack = field(default_factory=ExitStack)

    in_engine = True
    runs_as = ""
    brought = ()
    in_layers = None

    @classmethod
    def open(cls, name: str, platform: str | None) -> Self:
        """Open an image by name or ID; the engine pulls one that it lacks.

        Raises:
            EngineError: no Docker Engine responds.
            RemoteError: the image does not exist and cannot be pulled.
        """
        with ExitStack() as stack:
            client = docker.connect()
            stack.callback(client.close)
            image = docker.find_image(client, name, platform)
            return cls(client, image, stack.pop_all())

    @classmethod
    def present(cls, name: str) -> Self | None:
        """Open an image that the engine has; None without it, or without an engine.

        Raises:
            RemoteError: the engine has an error.
        """
        from docker.errors import APIError, ImageNotFound

        with ExitStack() as stack:
            try:
                client = docker.connect()
                stack.callback(client.close)
                return cls(client, client.images.get(name), stack.pop_all())
            except (EngineError, ImageNotFound):
                return None
            except APIError as error:
                raise RemoteError(f"Docker Engine error for {name}: {error.explanation}") from None

    @property
    def id(self) -> str:
        """Its ID."""
        return str(self.image.id)

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels in its configuration."""
        return docker.config_of(self.image).labels

    @property
    def env(self) -> Mapping[str, str]:
        """The environment in its configuration."""
        return docker.config_of(self.image).env

    @property
    def digests(self) -> tuple[str, ...]:
        """Its ID, and its digests in registries."""
        return docker.digests_of(self.image)

    @cached_property
    def container(self) -> Container:
        """A container of it, removed with `close`."""
        return self._stack.enter_context(docker.created(self.client, self.id))

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, or None."""
        return docker.read_file(self.container, path)

    def has(self, path: str) -> bool:
        """Whether a file exists."""
        return self.read(path) is not None

    def digest(self, path: str) -> str | None:
        """See `OpenImage`."""
        data = self.files_at(path).get(path)
        return None if data is None else sha256_hex(data)

    def files_at(self, path: str) -> dict[str, bytes]:
        """See `OpenImage`."""
        return docker.files_at(self.container, path)

    def all_files(self, name: str) -> dict[str, bytes]:  # noqa: ARG002
        """See `OpenImage`."""
        files = docker.export_files(self.container)
        return {path: data for path, data in files if data or path not in _OF_ENGINE}

    def fetch(self, paths: Iterable[str]) -> None:
        """Does nothing: each file needs its own request."""

    def copy(self, path: str, out: IO[bytes]) -> bool:
        """Stream a file to ``out``; returns whether it exists."""
        with docker.open_file(self.container, path) as stream:
            if stream is not None:
                shutil.copyfileobj(stream, out, 1 << 20)
        return stream is not None

    def close(self) -> None:
        """Remove the container, and close the connection."""
        self._stack.close()


def identify_image(request: BaseRequest, ref: str) -> Subject:
    """Identify an image with its own interpreter.

    Raises:
        EngineError: no Docker Engine responds.
        RemoteError: the image does not exist and cannot be pulled.
        UsageError: the image has no vLLM.
    """
    subject = InEngine.open(ref, request.platform)
    try:
        return identify_in_engine(request, subject, ref)
    except BaseException:
        subject.close()
        raise


def identify_in_engine(request: BaseRequest, subject: InEngine, ref: str) -> Subject:
    """Identify an open image in a Docker Engine; closing the base closes it."""
    image = subject.image
    facts = ImageFacts(
        ref=ref,
        digest=docker.digest_of(image.attrs, ref),
        config=docker.config_of(image),
        created=str(image.attrs.get("Created") or ""),
    )
    survey = _survey(subject.client, ref, request)
    base = image_base(facts, survey, subject, subject)
    check_vllm(base.tree, base.identity.site_packages)
    return base


def _survey(client: DockerClient, ref: str, request: BaseRequest) -> Survey:
    env = {"SPARK_BUILD_TRACKED": json.dumps(list(request.tracked))}
    try:
        output = docker.run(
            client, ref, ["/bin/sh", "-c", _FIND_PYTHON], env=env, user="0", program=IDENTIFY
        )
    except BuildFailed as error:
        if "exited 97" in str(error):
            raise UsageError(f"image {ref} has no Python with vllm") from None
        raise
    return survey_of(output, ref)


# ------------------------------------------------------------------------ in a registry or a layout


def identify_remote(request: BaseRequest, ref: str) -> Subject:
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


def with_files(image: Image, facts_of: FactsOf, *, noting: bool = False) -> InLayers:
    """An open image with its files; closed on failure.

    Raises:
        RemoteError: it has too many layers.
        SparkBuildError: the lock's data for it cannot be used (exit 9).
    """
    try:
        notes = RecordedFiles([layer.digest for layer in image.layers]) if noting else None
        facts = facts_of(image.layers)
        cache = LayerCache(image.source, diff_ids=image.diff_ids)
        return InLayers(image, Rootfs(image.layers, cache, facts, notes))
    except BaseException:
        image.close()
        raise


def identify_opened(request: BaseRequest, opened: InLayers, ref: str) -> Subject:
    """Identify an open image; closing the base closes it."""
    return known_base(request, opened, ref, survey_image(request, opened, ref))


def survey_image(request: BaseRequest, opened: InLayers, ref: str) -> Survey:
    """The survey of an image by its layers, for :func:`known_base`."""
    image, view = opened.image, opened.view
    config = image.config
    for python in interpreters(view, config.env, config.working_directory):
        distributions = _distributions(view, python, request.tracked)
        if "vllm" in distributions:
            break
    else:
        raise UsageError(f"image {ref} has no Python with vllm")
    site = distributions["vllm"][0]
    tops: dict[str, bool] = {}
    for name, (root, _, owned) in distributions.items():
        if root == site:
            tops.update(dict.fromkeys(owned, bool(probe.HASH_ALL.match(name))))
    files = probe.survey(_LayerDisk(view), site, tops)
    return Survey(
        interpreter=python.command,
        python=python.version,
        machine=config.architecture,
        site_packages=site,
        packages={name: version for name, (_, version, _) in distributions.items()},
        roots={name: root for name, (root, _, _) in distributions.items()},
        **{**files, "files": {path: tuple(facts) for path, facts in files["files"].items()}},
    )


def known_base(request: BaseRequest, opened: InLayers, ref: str, survey: Survey) -> Subject:
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
    return image_base(facts, survey, source, opened)


def _distributions(
    view: Rootfs, python: Interpreter, tracked: Iterable[str]
) -> dict[str, tuple[str, str, set[str]]]:
    """For each tracked distribution that an interpreter finds: root, version, top-level names."""
    wanted, distributions = set(tracked), {}
    for folder in python.path:
        root = view.realpath(folder)
        if root is None:
            continue
        for info in view.names(root):
            dist = distribution_of(info)
            if dist is None or dist.name not in wanted or dist.name in distributions:
                continue
            metadata = view.read(f"{root}/{info}/METADATA")
            if metadata is not None:
                record = view.read(f"{root}/{info}/RECORD")
                owned = probe.top_levels(recorded(record, f"{root}/{info}"))
                distributions[dist.name] = (root, _version_in(metadata, f"{root}/{info}"), owned)
    return distributions


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


# -------------------------------------------------------------- files that a released wheel has too


class ReleasedFiles:
    """Reads from the cache, then from released wheels, then from layers."""

    def __init__(
        self,
        view: Rootfs,
        site: str,
        files: Mapping[str, FileFacts],
        packages: Mapping[str, str],
        platform: Platform,
        index: PackageIndex,
    ) -> None:
        self._view, self._site, self._files = view, site, files
        self._packages, self._platform, self._index = packages, platform, index
        self._wheels: dict[str, RemoteWheel | None] = {}

    def read(self, path: str) -> bytes | None:
        data = self._cached(path)
        if data is None and self._owner(path) is not None:
            data = self._released([path]).get(path)
        if data is None:
            self._fetch([path])
            return self._view.read(path)
        self._view.noted(data)
        return data

    def fetch(self, paths: Iterable[str]) -> None:
        missing = [path for path in paths if self._cached(path) is None]
        released = self._released(missing)
        self._fetch([path for path in missing if path not in released])

    def _fetch(self, paths: Sequence[str]) -> None:
        """Read files from the layers, and cache others that may be needed from the same layers."""
        if any(self._cached(path) is None for path in paths):
            self._view.fetch(paths, self._texts())

    def _texts(self) -> Iterator[str]:
        """Files that should be cached and are not."""
        for path, (size, _, digest) in self._files.items():
            if is_text(path, size) and digest and self._view.content(digest) is None:
                yield f"{self._site}/{path}"

    def copy(self, path: str, out: IO[bytes]) -> bool:
        return self._view.copy(path, out)

    def _cached(self, path: str) -> bytes | None:
        digest = self._digest(path)
        return None if digest is None else self._view.content(digest)

    def _digest(self, path: str) -> str | None:
        entry = self._files.get(path.removeprefix(f"{self._site}/"))
        return None if entry is None else entry[2]

    def _released(self, paths: Iterable[str]) -> dict[str, bytes]:
        """Files that a released wheel has with the same bytes."""
        wanted: dict[str, list[str]] = {}
        for path in paths:
            owner = self._owner(path)
            if owner is not None:
                wanted.setdefault(owner, []).append(path)
        contents: dict[str, bytes] = {}
        for name, of_wheel in wanted.items():
            wheel = self._wheel(name)
            same = {path: member for path in of_wheel if (member := self._member(wheel, path))}
            if wheel is None or not same:
                continue
            try:
                wheel.preload(same.values())
                contents.update({path: wheel.read(member) for path, member in same.items()})
            except SparkBuildError as error:
                console.detail(f"{error}; reading the layers instead")
        return contents

    def _member(self, wheel: RemoteWheel | None, path: str) -> str | None:
        name = path.removeprefix(f"{self._site}/")
        member = wheel.members.get(name) if wheel is not None else None
        return name if member is not None and member.sha256 == self._digest(path) else None

    def _owner(self, path: str) -> str | None:
        """The distribution whose RECORD has this file with these bytes."""
        return self._records.get((path.removeprefix(f"{self._site}/"), self._digest(path) or ""))

    @cached_property
    def _records(self) -> dict[tuple[str, str], str]:
        owners: dict[tuple[str, str], str] = {}
        for path, (_, _, digest) in self._files.items():
            folder, _, name = path.partition("/")
            dist = distribution_of(folder) if name == "RECORD" else None
            if dist is None or self._packages.get(dist.name) != dist.version:
                continue
            for row in parse_record((digest and self._view.content(digest)) or b""):
                owners[row.path, row.sha256 or ""] = dist.name
        return owners

    def _wheel(self, name: str) -> RemoteWheel | None:
        """The release on the package index, or None."""
        if name not in self._wheels:
            try:
                file = self._index.choose(name, self._packages[name], self._platform)
                wheel: RemoteWheel | None = RemoteWheel(file, self._index)
                assert wheel is not None
                console.detail(f"{file.filename}: {len(wheel.members)} files")
            except (SparkBuildError, ApplyError) as error:
                console.detail(f"{name} is not available from the package index: {error}")
                wheel = None
            self._wheels[name] = wheel
        return self._wheels[name]


# ------------------------------------------------------------------------------------------- either


class Embedded(NamedTuple):
    """What spark-build wrote into an image: its plan, its layers, and the label of its plan."""

    plan: RecordedPlan | None
    layers: list[Layer]
    label: str


def embedded_in(subject: OpenImage, name: str) -> Embedded:
    """The metadata in an open image; an image of others has none.

    Raises:
        UsageError: the metadata is damaged.
    """
    plan = subject.read(f"{baked.SHARE}/plan.json")
    layers = subject.read(f"{baked.SHARE}/layers.json")
    return Embedded(
        plan=baked.read_plan(plan, name) if plan else None,
        layers=baked.read_layers(layers, name),
        label=subject.labels.get(baked.PLAN_LABEL, ""),
    )


def base_of(image: OpenImage, request: BaseRequest, ref: str) -> Subject:
    """An open image as a base, which the plan calls ``ref``; closing the base closes the image.

    Raises:
        UsageError: it has no vLLM that can be patched.
    """
    if isinstance(image, InEngine):
        return identify_in_engine(request, image, ref)
    assert isinstance(image, InLayers)
    return identify_opened(request, image, ref)
