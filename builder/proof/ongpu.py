"""Runs the in-image verifier on a GPU, for the levels ``device`` and ``serve``.

The verifier is the one in images (``builder/probes``), put into a container of the image
with the plan to compare with, so that it works on any image and its checks have
the same form as ours.  Without a GPU the result is *not run*, with the command to run on
the Spark.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from builder.common.console import console
from builder.common.document import read
from builder.errors import BuildFailed, SparkBuildError
from builder.images.engines.devicedata import device_data
from builder.images.engines.maker import VERIFIER, programs
from builder.proof.checks import VerifierDocument
from builder.proof.gpuoptions import OTHER, GpuOptions

if TYPE_CHECKING:
    from docker.models.containers import Container

    from builder.common.plan import PlanDocument

#: Folder of the verifier in a container.
INSIDE = "/tmp/spark-verify"  # noqa: S108 - of a container that is removed afterwards


class NoGpu(SparkBuildError):
    """The verifier cannot run on a GPU here."""


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
