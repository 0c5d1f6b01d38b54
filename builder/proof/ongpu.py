"""Levels ``device`` and ``serve``: runs the in-image verifier on a GPU.

The verifier is the one in images (``builder/probes``), put into a container of the image
with the plan to compare with, so that it works on any image and its checks have
the same form as ours.  Without a GPU the result is *not run*, with the command to run on
the Spark.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from builder.applier.files import DOCUMENT, read_regular
from builder.common.console import console
from builder.common.document import read
from builder.common.reference import Ref
from builder.errors import BuildFailed, SparkBuildError, UsageError
from builder.images.engines.devicedata import device_data
from builder.images.engines.maker import VERIFIER, programs
from builder.proof.checks import Check, VerifierDocument
from builder.proof.target import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from docker.models.containers import Container

    from builder.common.plan import PlanDocument
    from builder.proof.checks import Level
    from builder.proof.target import VerifyTarget

#: Folder of the verifier in a container.
INSIDE = "/tmp/spark-verify"  # noqa: S108 - of a container that is removed afterwards
OTHER = "against.json"
STATUSES = ("pass", "fail", "not-run")


class NoGpu(SparkBuildError):
    """The verifier cannot run on a GPU here."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of the levels."""

    bench: bool = False
    #: evidence to compare the bench with
    against: Path | None = None
    #: a local model: a folder, or a name in the Hugging Face cache
    model: str | None = None
    serve_args: str = ""

    def check(self, levels: Sequence[str]) -> None:
        """Refuse options without effect, before anything runs.

        Raises:
            UsageError: an option belongs to a level that was not requested, or evidence is
            malformed.
        """
        given = {
            "--bench": (self.bench, ("serve",)),
            "--against": (self.against, ("serve",)),
            "--model": (self.model, ("model", "serve")),
            "--serve-args": (self.serve_args, ("serve",)),
        }
        for name, (value, needed) in given.items():
            if value and not {*needed} & {*levels}:
                words = " or ".join(needed)
                raise UsageError(
                    f"{name} is for the level {words}, which was not requested",
                    hint=f"--level {','.join([*levels, needed[0]])}",
                )
        self.evidence()

    def evidence(self) -> bytes | None:
        """The evidence to compare with.

        Raises:
            UsageError: the evidence is malformed.
        """
        if self.against is None:
            return None
        try:
            data = read_regular(self.against, DOCUMENT)
            if not isinstance(json.loads(data)["checks"], list):
                raise TypeError("'checks' is not a list")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UsageError(
                f"--against {self.against} is not evidence of a verification: {error}",
                hint="spark-build verify OTHER --level serve --bench --json > FILE",
            ) from None
        return data

    def arguments(self, folder: str, level: str) -> list[str]:
        """The in-image verifier's command line."""
        words = ["--level", level, "--json"]
        if self.bench or self.against:
            words.append("--bench")
        if self.against:
            words += ["--against", f"{folder}/{OTHER}"]
        if self.model:
            words += ["--model", self.model]
        if self.serve_args:
            words += [f"--serve-args={self.serve_args}"]
        return words


def verifier_files(
    plan: PlanDocument, image: str, options: GpuOptions, folder: str = ""
) -> dict[str, bytes]:
    """The verifier, the plan and its data, by file name after ``folder``."""
    files = dict(programs())
    files["plan.json"] = msgspec.json.encode(plan)
    files["device.json"] = msgspec.json.encode(device_data(plan, image))
    other = options.evidence()
    if other is not None:
        files[OTHER] = other
    return {f"{folder}{name}": data for name, data in files.items()}


# --- where it runs -----------------------------------------------------------------------------


def run_in_container(
    image: str, interpreter: str, plan: PlanDocument, level: str, options: GpuOptions
) -> VerifierDocument:
    """Run the verifier in a container with all GPUs and no network; returns its document.

    Raises:
        NoGpu: the engine cannot provide a GPU, or the verifier gave no document.
    """
    import docker as sdk
    from docker.errors import APIError

    from builder.images.engines import docker

    command = [interpreter, "-B", f"{INSIDE}/{VERIFIER}", *options.arguments(INSIDE, level)]
    files = docker.tar_of(verifier_files(plan, image, options, f"{INSIDE}/"))
    client = docker.connect()
    try:
        own = docker.config_of(docker.find_image(client, image, None)).env
        with docker.created(
            client,
            image,
            command,
            environment={n: v for n, v in plan.env.items() if n not in own},
            device_requests=[sdk.types.DeviceRequest(count=-1, capabilities=[["gpu"]])],
            network_mode="none",
            shm_size="2g",
            volumes=_volumes(options),
        ) as container:
            container.put_archive("/", files)
            container.start()
            return _document(container)
    except (APIError, BuildFailed) as error:
        why = error.explanation if isinstance(error, APIError) else ""
        raise NoGpu(f"the Docker Engine gives no GPU: {why or error}") from None
    finally:
        client.close()


def _volumes(options: GpuOptions) -> dict[str, dict[str, str]]:
    """Mounts of a local model, or of the model cache."""
    if not options.model:
        return {}
    folder = Path(options.model)
    if folder.is_dir():
        return {str(folder.resolve()): {"bind": options.model, "mode": "ro"}}
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return {str(home): {"bind": "/root/.cache/huggingface", "mode": "ro"}} if home.is_dir() else {}


def _document(container: Container) -> VerifierDocument:
    for line in container.logs(stdout=False, stderr=True, stream=True, follow=True):
        console.say(line.decode("utf-8", "replace").rstrip())
    status = int(container.wait()["StatusCode"])
    output = container.logs(stdout=True, stderr=False).decode("utf-8", "replace")
    return verifier_document(output, status)


def verifier_document(output: str, status: int) -> VerifierDocument:
    """Parse the verifier's output.

    Raises:
        NoGpu: it is not a valid document.
    """
    try:
        document = json.loads(output)
    except (ValueError, RecursionError):
        tail = " | ".join(output.strip().splitlines()[-3:])
        words = f"the verifier exited with {status} and no document: {tail}"
        raise NoGpu(words) from None
    try:
        return read(document, VerifierDocument)
    except ValueError as error:
        raise NoGpu(f"the verifier's document is malformed: {error}") from None


def run_beside(
    python: Path, plan: PlanDocument, level: str, options: GpuOptions
) -> VerifierDocument:
    """Run the verifier in a local environment; returns its document.

    Raises:
        NoGpu: the verifier gave no document.
    """
    with tempfile.TemporaryDirectory(prefix="spark-verify-") as folder:
        for name, data in verifier_files(plan, str(python), options).items():
            (Path(folder) / name).write_bytes(data)
        answer = subprocess.run(
            [str(python), "-B", f"{folder}/{VERIFIER}", *options.arguments(folder, level)],
            stdout=subprocess.PIPE,
            env={**plan.env, **os.environ},
            text=True,
            check=False,
        )
    return verifier_document(answer.stdout, answer.returncode)


# --- checks ------------------------------------------------------------------------------------


def check_on_gpu(target: VerifyTarget, level: Level) -> Iterator[Check]:
    """The checks of one level, from the verifier."""
    ref = Ref(target.name)
    image = target.subject.image
    runs_as = image.runs_as if image is not None else ""
    name = runs_as or (ref.place if ref.has_name else "IMAGE")
    command = device_data(target.plan, name).command
    document = target.runner.on_gpu(target.plan, level)
    if isinstance(document, Refusal):
        yield _not_run(level, f"{document.reason}; on the Spark: {command}")
        return
    reported = document.checks
    if other := [check for check in reported if check.level != level]:
        problem = f"check {other[0].name!r} is of level {other[0].level}"
        yield _not_run(level, f"the verifier's document is malformed: {problem}")
        return
    checks = [replace(check, reason=_root(check)) for check in reported]
    if not checks:
        yield _not_run(
            level, "the verifier had nothing to check: no profile names expected results"
        )
    yield from checks


def _root(check: Check) -> str:
    """A failed server's log after its root cause according to ``spark-build diagnose``."""
    reason = check.reason
    if check.status != "fail" or check.level != "serve" or "\n" not in reason:
        return reason
    from builder.diagnose.verdict import diagnose

    errors = [f for f in diagnose(io.BytesIO(reason.encode())).findings if f.severity == "error"]
    if not errors:
        return reason
    first = errors[0]
    frame = f" ({first.frame})" if first.frame else ""
    told = f"{first.quote}{frame}: {first.message} {first.fix}"
    return "\n".join([told, *reason.splitlines()[-20:]])


def _not_run(level: Level, reason: str) -> Check:
    what = "the expected kernels on a GPU" if level == "device" else "vllm serve on a GPU"
    return Check(
        level=level, name=what, status="not-run", expected="a GB10", seen="", reason=reason
    )
