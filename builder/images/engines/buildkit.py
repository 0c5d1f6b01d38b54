"""The BuildKit engine: a rendered Dockerfile and a context of ready files, built by the CLI.

The context has one folder for each layer with its final files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console, counted, megabytes
from builder.common.diskspace import Need
from builder.common.hints import TEMPORARY, os_hint
from builder.common.reference import Ref
from builder.errors import BuildFailed, EngineError, RemoteError
from builder.images.engines import baked, docker, metadata
from builder.images.engines.buildx import (
    ENGINE,
    LINK_SINCE,
    Builder,
    Cli,
    cache_words,
    engine_environment,
    find_cli,
    reached,
    run_build,
)
from builder.images.engines.dockerfile import render
from builder.images.engines.metadata import added_bytes, content_bytes, image_layers
from builder.images.engines.model import BuildRequest, BuiltImage, refuses_base
from builder.images.engines.oci import base_bytes, in_layout, layout_digest, load_needs, new_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.trees import Content
    from builder.common.plan import BuildPlan


def folder_of(name: str) -> str:
    """A layer's folder; it has no number, so that adding a layer keeps the others cached."""
    return f"layer-{name}"


@contextlib.contextmanager
def context_of(plan: BuildPlan) -> Iterator[tuple[Path, int]]:
    """A build context with every layer's files, and their size in bytes."""
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        yield Path(folder), fill_context(Path(folder), plan)


def fill_context(folder: Path, plan: BuildPlan) -> int:
    """Write every layer's files into a build context; returns their size in bytes."""
    added = 0
    for name, files in image_layers(plan):
        target = folder / folder_of(name)
        with console.progress(f"writing {name}", content_bytes(files), leaves_line=False) as bar:
            size = write_context(target, files, plan.epoch, bar.advance)
        console.say(f"  {name:<28}{counted(len(files), 'file'):>11} {megabytes(size):>10}")
        added += size
    return added


def write_context(
    root: Path,
    files: Mapping[str, Content | None],
    epoch: int,
    moved: Callable[[int], object] = lambda _size: None,
) -> int:
    """Write a layer's files below ``root`` with fixed times and modes; returns their size in bytes.

    Raises:
        BuildFailed: the disk is full or not writable.
    """
    size = 0
    try:
        root.mkdir()
        for path, content in sorted(files.items()):
            if content is None:
                continue
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
            target.chmod(content.mode)
            os.utime(target, (epoch, epoch))
            size += content.size
            moved(content.size)
        for folder, _, _ in os.walk(root, topdown=False):
            Path(folder).chmod(0o755)
            os.utime(folder, (epoch, epoch))
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise BuildFailed(
            f"cannot write the build context below {root.parent}: {error.strerror}",
            hint=os_hint(error, TEMPORARY),
        ) from error
    return size


# --------------------------------------------------------------------------------------- the engine


#: buildx's message if a builder's driver does not support cache export.
_NO_CACHE = re.compile(r"cache export (feature )?is (currently )?not supported", re.IGNORECASE)


class BuildkitEngine:
    """Builds with a Docker Engine, or on a builder."""

    name = "buildkit"

    def __init__(self, builder: str = "") -> None:
        self.builder = builder

    @cached_property
    def _cli(self) -> Cli | None:
        return find_cli()

    def missing(self) -> str | None:
        if self._cli is None:
            return "no docker client with buildx is on PATH"
        if self.builder:
            return None if self._cli.buildx else f"{self._cli.binary} has no buildx"
        try:
            docker.connect().close()
        except EngineError as error:
            return str(error)
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        if self.builder and plan.base.in_layout:
            return (
                f"{plan.base.ref} is a directory on this machine, but builder {self.builder} takes "
                "its base from a registry"
            )
        return refuses_base(plan)

    @cached_property
    def _links(self) -> bool:
        if self.builder:
            return True
        client = docker.connect()
        version = str(client.version().get("Version", "0"))
        client.close()
        return int(version.split(".", 1)[0]) >= LINK_SINCE

    def render(self, plan: BuildPlan) -> str:
        return _dockerfile(plan, self._base_name(plan), links=self._links)

    def _base_name(self, plan: BuildPlan) -> str:
        if plan.base.is_wheels:
            return "scratch"
        name = plan.base.ref.split("@")[0]
        return _pinned_name(plan) if "/" in name or self.builder else name

    def needs(self, request: BuildRequest) -> list[Need]:
        added = added_bytes(request.plan)
        needs = [Need.temporary(added, "the build context")]
        if self.builder and request.output is not None:
            size = added + base_bytes(request)
            return [*needs, Need.output(request.output, size, "the base's and the new layers")]
        if self.builder and request.push:
            return needs
        return needs + load_needs(added + (base_bytes(request) if self.builder else 0))

    def build(self, request: BuildRequest) -> BuiltImage:
        return self._on_builder(request) if self.builder else self._on_engine(request)

    def _on_engine(self, request: BuildRequest) -> BuiltImage:
        """Build in the local Docker Engine, on its copy of the base."""
        assert self._cli is not None
        plan = request.plan
        words = ["--builder", ENGINE, "--load"] if self._cli.buildx else []
        # without it BuildKit looks for the base of this machine's platform
        words += ["--platform", plan.base.platform.oci]
        with context_of(plan) as (context, added), self._pinned_base(plan) as base:
            _write_dockerfile(context, plan, base, links=self._links)
            words += ["-t", request.tag]
            cached = self._run(context, request, words, {**self._cli.env, **engine_environment()})
        client = docker.connect()
        try:
            digest = str(client.images.get(request.tag).id)
            if request.push:
                digest = docker.push(client, request.tag) or digest
        finally:
            client.close()
        return BuiltImage(
            ref=Ref(request.tag), digest=digest, added_bytes=added, engine=self.name, cached=cached
        )

    def _on_builder(self, request: BuildRequest) -> BuiltImage:
        """Build on a builder, with the base from its registry; deliver the image."""
        assert self._cli is not None
        plan, output = request.plan, request.output
        here = not (request.push or output)
        if here:
            docker.connect().close()  # before anything is built that it could not take
        with (
            reached(self._cli.binary, self.builder) as builder,
            context_of(plan) as (context, added),
        ):
            console.say(f"  on builder {builder.given} (driver {builder.driver})")
            _write_dockerfile(context, plan, self._base_name(plan), links=builder.links)
            with contextlib.ExitStack() as stack:
                layout: Path | None = None
                if output is not None:
                    layout = stack.enter_context(new_layout(output, request.tag))
                    to = ["--output", f"type=oci,tar=false,name={request.tag},dest={layout}"]
                else:
                    to = ["--push" if request.push else "--load", "-t", request.tag]
                cached, digest = self._there(context, request, builder, to)
                if layout is not None:
                    digest = layout_digest(layout)
        if here:
            client = docker.connect()
            try:
                digest = str(client.images.get(request.tag).id)
            finally:
                client.close()
        built = BuiltImage(
            ref=Ref(request.tag),
            digest=digest,
            added_bytes=added,
            engine=self.name,
            target=Ref(f"docker://{request.tag}@{digest}") if request.push else None,
            cached=cached,
        )
        return built if output is None else in_layout(built, output)

    def _there(
        self, context: Path, request: BuildRequest, builder: Builder, to: Sequence[str]
    ) -> tuple[dict[tuple[str, str], bool], str]:
        """Run the build on a builder; returns which layers were cached, and the image's digest."""
        with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
            told = Path(folder) / "metadata.json"
            words = ["--builder", builder.name, "--platform", request.plan.base.platform.oci, *to]
            words += ["--metadata-file", str(told)]
            env = {**engine_environment(), **builder.env}
            cached = self._run(context, request, words, env)
            digest = json.loads(told.read_bytes()).get("containerimage.digest", "")
        return cached, str(digest)

    @staticmethod
    def _pinned_base(plan: BuildPlan) -> contextlib.AbstractContextManager[str]:
        if plan.base.is_wheels:
            return contextlib.nullcontext("scratch")
        return docker.pinned(plan.base.ref, plan.base.digest)

    def _run(
        self,
        context: Path,
        request: BuildRequest,
        words: Sequence[str],
        env: Mapping[str, str],
    ) -> dict[tuple[str, str], bool]:
        """Run the build; returns for each patch layer whether it was cached."""
        assert self._cli is not None
        epoch, platform = str(request.plan.epoch), request.plan.base.platform.oci
        words = [*words, *cache_words(request.cache_from, "from")]
        words += [*cache_words(request.cache_to, "to"), str(context)]
        ran = run_build(self._cli, words, {**env, "SOURCE_DATE_EPOCH": epoch})
        if ran.status != 0:
            raise self._failure(ran.status, ran.progress.tail, ran.output, platform)
        return {
            (platform, d.name): ran.progress.cached[folder_of(d.name)]
            for d in request.plan.needed
            if folder_of(d.name) in ran.progress.cached
        }

    @property
    def _where(self) -> str:
        return f"builder {self.builder}" if self.builder else "the Docker Engine"

    def _failure(self, status: int, tail: str, output: str, platform: str) -> Exception:
        where = f" on builder {self.builder}" if self.builder else ""
        if _NO_CACHE.search(output):
            return EngineError(
                f"this builder cannot export its cache{where}; builders of other drivers and "
                f"Docker Engines with the containerd image store can:\n  {tail}",
                hint="--builder NAME",
            )
        if "exec format error" in output:
            return EngineError(
                f"{self._where} cannot run programs of {platform}:\n  {tail}",
                hint="--engine oci",
            )
        if re.search(r"failed to push|error writing (manifest|layer) blob", output):
            return RemoteError(f"pushing failed{where}:\n  {tail}", hint="docker login")
        if self.builder and "failed to resolve source metadata" in output:
            return RemoteError(
                f"builder {self.builder} cannot reach the base in its registry:\n  {tail}",
                hint="push the base to a registry that the builder can reach, then use --base "
                "docker://HOST/NAME:TAG",
            )
        return BuildFailed(f"docker build exited {status}{where}:\n  {tail}")


def write_pinned_context(folder: Path, plan: BuildPlan) -> int:
    """Write a build context for any buildx builder; returns the layers' size in bytes.

    The base is named by its digest in its registry.
    """
    added = fill_context(folder, plan)
    _write_dockerfile(folder, plan, _pinned_name(plan), links=True)
    return added


def _write_dockerfile(context: Path, plan: BuildPlan, base: str, *, links: bool) -> None:
    (context / "Dockerfile").write_text(_dockerfile(plan, base, links=links))


def _pinned_name(plan: BuildPlan) -> str:
    return f"{plan.base.ref.split('@')[0]}@{plan.base.digest}"


def _dockerfile(plan: BuildPlan, base: str, *, links: bool) -> str:
    folders = [{"title": name, "folder": folder_of(name)} for name, _ in image_layers(plan)]
    finish = None
    gone = any(content is None for content in plan.changes.values())
    owners = ["--owners", baked.OWNERS] if metadata.restored(plan) else []
    if (gone or owners) and plan.base.is_image:
        finish = metadata.finish_command(plan.base.interpreter, plan.base.site_packages, *owners)
    return render(
        "image.Dockerfile.j2",
        base=base,
        user=plan.base.user,
        copy_flags="--link " if links else "",
        run_flags="--network=none " if links else "",
        layers=folders,
        finish=finish,
        env=sorted(plan.env.items()),
        labels=sorted(metadata.labels(plan).items()),
    )
