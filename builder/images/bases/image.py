"""A base that is an image in a Docker Engine, identified by code that runs in the image.

Interpreter, site-packages path, versions and hashes come from the image; nothing is
assumed about Python 3.12 or /usr/local.
"""

from __future__ import annotations

import json
import shutil
from typing import IO, TYPE_CHECKING

from builder.common.programs import IDENTIFY, IN_CONTAINER
from builder.errors import BuildFailed, UsageError
from builder.images.bases.imagetree import ImageFacts, Survey, image_base, survey_of
from builder.images.bases.records import check_vllm
from builder.images.engines import docker as engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from docker import DockerClient
    from docker.models.containers import Container

    from builder.images.bases.model import BaseRequest
    from builder.images.rootfs.base import Base

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


class _ContainerFiles:
    """Files of a container that was created but not started."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def read(self, path: str) -> bytes | None:
        return engine.read_file(self._container, path)

    def fetch(self, paths: Iterable[str]) -> None:
        """Does nothing: each file needs its own request."""

    def copy(self, path: str, out: IO[bytes]) -> bool:
        with engine.open_file(self._container, path) as stream:
            if stream is not None:
                shutil.copyfileobj(stream, out, 1 << 20)
        return stream is not None


def identify_image(request: BaseRequest, ref: str) -> Base:
    """Identify an image with its own interpreter.

    Raises:
        EngineError: no Docker Engine responds.
        RemoteError: the image does not exist and cannot be pulled.
        UsageError: the image has no vLLM.
    """
    client = engine.connect()
    image = engine.find_image(client, ref, request.platform)
    survey = _survey(client, ref, request)
    facts = ImageFacts(
        ref=ref,
        digest=engine.digest_of(image.attrs, ref),
        config=engine.config_of(image),
        created=str(image.attrs.get("Created") or ""),
    )
    holder = engine.created(client, image.id or ref)
    container = holder.__enter__()

    def close() -> None:
        holder.__exit__(None, None, None)
        client.close()

    try:
        base = image_base(facts, survey, _ContainerFiles(container), close)
        check_vllm(base.tree, base.identity.site_packages)
    except BaseException:
        close()
        raise
    return base


def _survey(client: DockerClient, ref: str, request: BaseRequest) -> Survey:
    env = {"SPARK_BUILD_TRACKED": json.dumps(list(request.tracked))}
    try:
        output = engine.run(
            client, ref, ["/bin/sh", "-c", _FIND_PYTHON], env=env, user="0", program=IDENTIFY
        )
    except BuildFailed as error:
        if "exited 97" in str(error):
            raise UsageError(f"image {ref} has no Python with vllm") from None
        raise
    return survey_of(output, ref)
