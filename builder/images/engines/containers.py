"""Runs scripts in containers: each run is one build of ``dockerfiles/compile.Dockerfile.j2``.

So it runs where builds run (the local Docker Engine, or a remote builder), and the result of a
successful script comes from the builder's cache if its inputs are unchanged.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.reference import Ref
from builder.errors import BuildFailed, EngineError, RemoteError, UsageError
from builder.images.engines import docker
from builder.images.engines.buildx import (
    ENGINE,
    Cli,
    engine_environment,
    find_cli,
    reached,
    run_build,
)
from builder.images.engines.docker import engine_root
from builder.images.engines.dockerfile import render
from builder.images.engines.tasks import ROOT, PinnedImage, Task, TaskFailed
from builder.images.rootfs.image import OtherPlatform, open_image

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_TEMPLATE = "compile.Dockerfile.j2"
#: BuildKit's message for a failed script, with its exit status.
_STATUS = re.compile(r"did not complete successfully: exit code: (\d+)")
#: Messages of runc for a missing program, and of BuildKit for an empty image.
_NO_SHELL = re.compile(r"/bin/sh\S*: (stat .*)?no such file|`/bin/sh` not found in|find user 0")


class Containers:
    """Containers on the local Docker Engine, or on a builder."""

    def __init__(self, builder: str = "") -> None:
        self.builder = builder

    @property
    def where(self) -> str:
        """The name of the place in messages."""
        return f"builder {self.builder}" if self.builder else "the Docker Engine"

    @cached_property
    def elsewhere(self) -> bool:
        """Whether they run on another machine, as far as is known."""
        if self.builder:
            return True
        with contextlib.closing(docker.connect()) as client:
            return engine_root(client) is None

    @cached_property
    def _cli(self) -> Cli:
        cli = find_cli()
        if cli is None or cli.buildx is None:
            what = "no docker client is on PATH" if cli is None else f"{cli.binary} has no buildx"
            raise EngineError(
                f"{what}, and compiling in a container needs BuildKit",
                hint="install docker-buildx, or leave --toolkit out where this machine has nvcc",
            )
        return cli

    def resolve(self, ref: str, platform: str) -> PinnedImage:
        """Resolve a reference; the Docker Engine pulls the image if it lacks it.

        Raises:
            EngineError: no engine or client is available, or the image is for another platform.
            RemoteError: the image is not available.
            UsageError: the reference is malformed.
        """
        named = Ref(ref)
        if not named.has_name:
            raise UsageError(
                f"--toolkit {ref}: a builder needs it in a registry or a Docker Engine",
                hint="--toolkit HOST/NAME:TAG",
            )
        _ = self._cli
        ref, digest, has = (self._in_registry if self.builder else self._here)(
            named.place, platform
        )
        image = PinnedImage(ref=ref, digest=digest, platform=platform)
        if has != platform:
            raise EngineError(
                f"{image.name} is for {has}, but the target platform is {platform}",
                hint=f"name an image for {platform} with --toolkit",
            )
        return image

    @staticmethod
    def _here(ref: str, platform: str) -> tuple[str, str, str]:
        """Find a local image; one with a digest may have only a tag and no repository digest."""
        tag, _, digest = ref.partition("@")
        try:
            client = docker.connect()
        except EngineError as error:
            hint = "start Docker, or name a BuildKit with --builder"
            raise EngineError(str(error), hint=hint) from None
        with contextlib.closing(client):
            if digest:
                with contextlib.suppress(RemoteError):
                    image = docker.find_image(client, tag, platform, pull=False)
                    if digest in docker.digests_of(image):
                        return tag, digest, f"linux/{image.attrs.get('Architecture')}"
            image = docker.find_image(client, ref, platform)
            digest = digest or docker.digest_of(image.attrs, ref)
            return ref, digest, f"linux/{image.attrs.get('Architecture')}"

    @staticmethod
    def _in_registry(ref: str, platform: str) -> tuple[str, str, str]:
        try:
            image = open_image(Ref(ref), platform)
        except OtherPlatform as error:
            raise EngineError(str(error), hint="name another image with --toolkit") from None
        with contextlib.closing(image):
            return ref, image.top.digest, f"linux/{image.config.architecture}"

    def render(self, image: str, tasks: Sequence[Task], mounts: Sequence[str]) -> str:
        """The Dockerfile of a run."""
        targets = [{"name": mount, "target": ROOT / mount} for mount in mounts]
        return render(_TEMPLATE, image=image, tasks=tasks, mounts=targets, root=ROOT)

    def run(
        self, image: PinnedImage, tasks: Sequence[Task], mounts: Mapping[str, Path], out: Path
    ) -> None:
        """Run scripts, in parallel unless one must follow another.

        Args:
            image: the image to run them in.
            tasks: the scripts.
            mounts: local folders, by their names below ``/spark-build``.
            out: the folder for results, with a subfolder for each task.

        Raises:
            TaskFailed: a script failed.
            EngineError: the engine or builder cannot run the image.
            RemoteError: the image is not available to it.
            BuildFailed: it failed for another reason.
        """
        with self._reached(image) as (name, words, env), _context() as context:
            (context / "Dockerfile").write_text(self.render(name, tasks, list(mounts)))
            for task in tasks:
                (context / f"{task.name}.sh").write_text(task.script)
            words = [*words, "--platform", image.platform, "--output", f"type=local,dest={out}"]
            for mount, folder in mounts.items():
                words += ["--build-context", f"{mount}={folder}"]
            ran = run_build(self._cli, [*words, str(context)], env)
        if ran.status != 0:
            raise self._failure(image, ran.output, ran.progress.tail, "\n".join(ran.progress.logs))

    @contextlib.contextmanager
    def _reached(self, image: PinnedImage) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """The image's name on the engine or builder, and the client's arguments to select it."""
        if self.builder:
            with reached(self._cli.binary, self.builder) as builder:
                words = ["--builder", builder.name]
                yield image.exact, words, {**engine_environment(), **builder.env}
            return
        with docker.pinned(image.ref, image.digest) as name:
            yield name, ["--builder", ENGINE], {**self._cli.env, **engine_environment()}

    def _failure(self, image: PinnedImage, output: str, tail: str, logs: str) -> Exception:
        if "exec format error" in output:
            return EngineError(
                f"{self.where} cannot run {image.name}, which is for {image.platform}",
                hint=f"name a builder on a {image.platform} machine with --builder",
            )
        if _NO_SHELL.search(output):
            return EngineError(
                f"{image.name} has no /bin/sh, which is needed",
                hint="name an image with nvcc and g++ with --toolkit",
            )
        if "failed to resolve source metadata" in output or "failed to do request" in output:
            return RemoteError(
                f"{self.where} cannot pull {image.exact}:\n  {tail}",
                hint="name an image in a registry that it can reach with --toolkit HOST/NAME:TAG",
            )
        if status := _STATUS.search(output):
            return TaskFailed(int(status[1]), logs)
        return BuildFailed(f"the build in {image.name} failed on {self.where}:\n  {tail}")


@contextlib.contextmanager
def _context() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        yield Path(folder)
