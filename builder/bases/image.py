"""A base that is an image: asked through a Docker Engine, inside the image itself.

Interpreter, site-packages path, versions and hashes are the image's own answers; nothing is
assumed about Python 3.12 or /usr/local.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from builder.bases import Base, BaseRequest
from builder.engines import docker as engine
from builder.errors import BuildFailed, UsageError
from builder.model import BaseIdentity, Platform
from builder.paths import package_file
from builder.runtime.spark_apply import (
    ENV_PTH,
    Distribution,
    distribution_of,
    env_of,
    sha256_hex,
)

if TYPE_CHECKING:
    from docker.models.containers import Container

#: Interpreters to try, in order, until one has vLLM; a shell is all this needs of the image.
_FIND_PYTHON = """
for python in "${VIRTUAL_ENV:-/nonexistent}/bin/python" python3 python /opt/venv/bin/python3 \
    /usr/local/bin/python3 /usr/bin/python3; do
  command -v "$python" >/dev/null 2>&1 || continue
  "$python" -c 'import importlib.metadata as m; m.version("vllm")' >/dev/null 2>&1 || continue
  exec "$python" -B -c "$SPARK_BUILD_PROBE"
done
exit 97
"""


class ImageTree:
    """Site-packages of a container that is never started, with a manifest made beforehand."""

    def __init__(self, container: Container, site: str, files: dict[str, Any]) -> None:
        self._container, self._site, self._files = container, site, files
        self._cache: dict[str, bytes | None] = {}

    def read(self, path: str) -> bytes | None:
        if path not in self._files and not path.endswith(".pth"):
            return None
        if path not in self._cache:
            self._cache[path] = engine.read_file(self._container, f"{self._site}/{path}")
        return self._cache[path]

    def digest(self, path: str) -> str | None:
        entry = self._files.get(path)
        if entry is None:
            return None
        if entry[2] is None:
            data = self.read(path)
            entry[2] = None if data is None else sha256_hex(data)
        digest: str | None = entry[2]
        return digest

    def mode(self, path: str) -> int:
        return int(self._files[path][1])

    @cached_property
    def _children(self) -> dict[str, set[str]]:
        children: dict[str, set[str]] = {}
        for path in self._files:
            parts = path.split("/")
            for depth, name in enumerate(parts):
                children.setdefault("/".join(parts[:depth]), set()).add(name)
        return children

    def children(self, directory: str) -> list[str]:
        return sorted(self._children.get(directory, ()))

    def distributions(self) -> dict[str, Distribution]:
        found = {}
        for name in self.children(""):
            dist = distribution_of(name)
            if dist is not None and f"{name}/METADATA" in self._files:
                found[dist.name] = dist
        return found


def identify_image(request: BaseRequest, ref: str) -> Base:
    """Identify an image by asking its own interpreter.

    Raises:
        EngineError: no Docker Engine answers.
        RemoteError: the image is not there and cannot be pulled.
        UsageError: the image holds no vLLM.
    """
    client = engine.connect()
    image = engine.find_image(client, ref, request.platform)
    answer = _ask(client, ref, request)
    config = image.attrs.get("Config") or {}
    env = engine.env_of_image(image)
    site = str(answer["site_packages"])
    scattered = {name: root for name, root in answer["roots"].items() if root != site}
    if scattered:
        listed = ", ".join(f"{name} in {root}" for name, root in scattered.items())
        raise UsageError(f"{ref}: vllm is in {site}, but {listed}; layers patch one directory")
    holder = engine.created(client, image.id or ref)
    container = holder.__enter__()
    tree = ImageTree(container, site, answer["files"])
    if tree.read(ENV_PTH) is not None:  # a mod ran here: its settings reach every Python
        env = {**env_of(tree), **env}
    identity = BaseIdentity(
        kind="image",
        ref=ref,
        digest=_digest(image.attrs, ref),
        platform=Platform.parse(str(answer["machine"]), str(answer["python"])),
        site_packages=site,
        packages=answer["packages"],
        env=env,
        interpreter=str(answer["interpreter"]),
        folders=answer["folders"],
        user=str(config.get("User") or ""),
        created=str(image.attrs.get("Created") or ""),
    )

    def close() -> None:
        holder.__exit__(None, None, None)
        client.close()

    return Base(identity, tree, close)


def _digest(attrs: dict[str, Any], ref: str) -> str:
    """The manifest digest of the registry that the reference names, else the image ID."""
    repository = ref.partition("@")[0]
    if ":" in repository.rsplit("/", 1)[-1]:
        repository = repository.rpartition(":")[0]
    for entry in attrs.get("RepoDigests") or []:
        name, _, digest = str(entry).partition("@")
        if name == repository:
            return digest
    return str(attrs["Id"])


def _ask(client: Any, ref: str, request: BaseRequest) -> dict[str, Any]:
    probe = package_file("runtime", "identify_probe.py").read_text("utf-8")
    env = {"SPARK_BUILD_PROBE": probe, "SPARK_BUILD_TRACKED": json.dumps(list(request.tracked))}
    try:
        output = engine.run(client, ref, ["/bin/sh", "-c", _FIND_PYTHON], env=env, user="0")
    except BuildFailed as error:
        if "exited 97" in str(error):
            raise UsageError(f"image {ref} holds no Python that has vllm") from None
        raise
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer
