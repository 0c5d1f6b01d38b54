"""The BuildKit engine: a rendered Dockerfile and a context of ready files, built by the CLI."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from builder import bake
from builder.console import console, megabytes
from builder.engines import BuildRequest, BuiltImage, docker
from builder.engines.contents import image_layers
from builder.errors import BuildFailed, EngineError
from builder.paths import data_dir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.model import BuildPlan
    from builder.runtime.spark_apply import Content

#: First engine whose built-in Dockerfile frontend takes ``COPY --link`` (BuildKit 0.11).
_LINK_SINCE = 23


@dataclass(frozen=True)
class Cli:
    """A docker client that can drive BuildKit, and how."""

    binary: str
    command: tuple[str, ...]
    env: Mapping[str, str]


def find_cli() -> Cli | None:
    """The first ``docker`` on PATH that can build with BuildKit.

    Several clients may be installed, and the first need not have buildx; each is asked.
    """
    named = os.environ.get("SPARK_BUILD_DOCKER")
    places = os.environ.get("PATH", "").split(os.pathsep)
    binaries = [named] if named else [str(Path(p) / "docker") for p in places if p]
    for binary in binaries:
        if not os.access(binary, os.X_OK):
            continue
        if _succeeds([binary, "buildx", "version"]):
            return Cli(binary, (binary, "buildx", "build", "--load", "--provenance=false"), {})
        answer = subprocess.run(
            [binary, "version", "--format", "{{.Client.Version}}"],
            capture_output=True,
            text=True,
            check=False,
        )
        major = answer.stdout.split(".")[0]
        if major.isdigit() and 18 <= int(major) < _LINK_SINCE:  # BuildKit is inside these
            return Cli(binary, (binary, "build"), {"DOCKER_BUILDKIT": "1"})
    return None


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class BuildkitEngine:
    """Builds through a Docker Engine."""

    name = "buildkit"

    @cached_property
    def _cli(self) -> Cli | None:
        return find_cli()

    def missing(self) -> str | None:
        if self._cli is None:
            return "no docker client with buildx is on PATH"
        try:
            docker.connect().close()
        except EngineError as error:
            return str(error)
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        if plan.base.kind in ("image", "pypi"):
            return None
        return f"a {plan.base.kind} base is not an image; use spark-build apply"

    @cached_property
    def _links(self) -> bool:
        client = docker.connect()
        version = str(client.version().get("Version", "0"))
        client.close()
        return int(version.split(".", 1)[0]) >= _LINK_SINCE

    def render(self, plan: BuildPlan) -> str:
        return self._render(plan, self._base_name(plan), [name for name, _ in image_layers(plan)])

    @staticmethod
    def _base_name(plan: BuildPlan) -> str:
        if plan.base.kind == "pypi":
            return "scratch"
        name = plan.base.ref.split("@")[0]
        return f"{name}@{plan.base.digest}" if "/" in name else name

    def _render(self, plan: BuildPlan, base: str, names: list[str]) -> str:
        import jinja2

        loader = jinja2.FileSystemLoader(data_dir("dockerfiles"))
        environment = jinja2.Environment(
            loader=loader,
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # noqa: S701 - a Dockerfile, not HTML
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["quoted"] = bake.quoted
        folders = [{"title": n, "folder": _folder(i, n)} for i, n in enumerate(names)]
        finish = None
        gone = any(content is None for content in plan.changes.values())
        if (gone or bake.restored(plan)) and plan.base.kind == "image":
            script = f"{bake.SHARE}/spark_apply.py"
            site = plan.base.site_packages
            finish = [plan.base.interpreter, "-B", script, "finish", "--root", site]
        return environment.get_template("image.Dockerfile.j2").render(
            base=base,
            user=plan.base.user,
            copy_flags="--link " if self._links else "",
            run_flags="--network=none " if self._links else "",
            layers=folders,
            finish=finish,
            env=sorted(plan.env.items()),
            labels=sorted(bake.labels(plan).items()),
        )

    def build(self, request: BuildRequest) -> BuiltImage:
        plan = request.plan
        assert self._cli is not None
        layers = image_layers(plan)
        with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
            context = Path(folder)
            added = 0
            for number, (name, files) in enumerate(layers):
                size = write_context(context / _folder(number, name), files, bake.timestamp(plan))
                console.say(f"  {name:<22}{len(files):>5} files {megabytes(size):>10}")
                added += size
            base = self._pin_base(plan)
            dockerfile = self._render(plan, base, [name for name, _ in layers])
            (context / "Dockerfile").write_text(dockerfile)
            try:
                self._run(context, request)
            finally:
                self._unpin_base(base)
        client = docker.connect()
        try:
            digest = str(client.images.get(request.tag).id)
            if request.push:
                digest = docker.push(client, request.tag) or digest
        finally:
            client.close()
        return BuiltImage(ref=request.tag, digest=digest, added_bytes=added, engine=self.name)

    @staticmethod
    def _pin_base(plan: BuildPlan) -> str:
        """A name for exactly the image that was identified, whatever its tag points to by now."""
        if plan.base.kind == "pypi":
            return "scratch"
        client = docker.connect()
        try:
            image = docker.find_image(client, plan.base.ref, None)
            known = {image.id, *(d.partition("@")[2] for d in image.attrs.get("RepoDigests") or [])}
            if plan.base.digest not in known:
                raise BuildFailed(
                    f"{plan.base.ref} is no longer {plan.base.digest}: the tag moved meanwhile",
                    hint="run the same command again",
                )
            pinned = f"spark-build-base:{plan.base.digest.removeprefix('sha256:')[:24]}"
            image.tag(pinned)
        finally:
            client.close()
        return pinned

    @staticmethod
    def _unpin_base(pinned: str) -> None:
        """Take our name off the base again; the image itself stays."""
        if pinned == "scratch":
            return
        client = docker.connect()
        try:
            if len(client.images.get(pinned).tags) > 1:
                client.images.remove(pinned, noprune=True)
        finally:
            client.close()

    def _run(self, context: Path, request: BuildRequest) -> None:
        assert self._cli is not None
        epoch = str(bake.timestamp(request.plan))
        command = [*self._cli.command, "--progress=plain", "--network=none", "-t", request.tag]
        if request.plan.base.kind == "pypi":
            command += ["--platform", request.plan.base.platform.oci]
        command += [str(context)]
        console.detail(f"+ {' '.join(command)}")
        env = {**os.environ, **self._cli.env, "SOURCE_DATE_EPOCH": epoch}
        process = subprocess.run(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for line in process.stdout.splitlines():
            console.detail(line)
        if process.returncode != 0:
            tail = "\n  ".join(process.stdout.splitlines()[-40:])
            raise BuildFailed(f"docker build exited {process.returncode}:\n  {tail}")


def _folder(number: int, name: str) -> str:
    return f"{number:02}-{name}"


def write_context(root: Path, files: Mapping[str, Content | None], epoch: int) -> int:
    """Write a layer's files below ``root`` with fixed times and modes; gives their bytes.

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
        for folder, _, _ in os.walk(root, topdown=False):
            Path(folder).chmod(0o755)
            os.utime(folder, (epoch, epoch))
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise BuildFailed(
            f"cannot write the build context below {root.parent}: {error.strerror}",
            hint="free some space, or set TMPDIR to another disk",
        ) from error
    return size
