"""Containers as sparkrun and spark-vllm-docker start them, and mods as they run them in these.

sparkrun's side is its own package: it writes the `docker run` line and runs the mod.  Only the
user is ours (``$(id -u)`` would be root here); the GPU is left out, and limits that not every
machine may raise.  spark-vllm-docker is not a package, so its side is written from what its
``launch-cluster.sh`` does.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.clients.programs import environment
from tests.clients.test_clients import SPARKRUN

from . import support
from .support import Done

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from .machine import Engine

#: The user whose server sparkrun starts.
USER = 1000
INSIDE = "/run/authorities.pem"

_LAUNCH = """
import json, sys
from sparkrun.core.bootstrap import get_runtime, init_sparkrun
from sparkrun.core.recipe import Recipe
from sparkrun.core.runtime_cache import build_runtime_cache_mounts, resolve_runtime_cache_settings
from sparkrun.orchestration.executor import resolve_executor
from sparkrun.orchestration.runtime_cache import generate_runtime_cache_script
asked = json.load(sys.stdin)
init_sparkrun()
recipe = Recipe.load(asked["recipe"])
runtime = get_runtime(recipe.runtime)
executor = resolve_executor(recipe=recipe, runtime=runtime, cli_overrides=asked["executor"])
mounts = build_runtime_cache_mounts(
    runtime=runtime, recipe=recipe, root=asked["cache"],
    settings=resolve_runtime_cache_settings(runtime=runtime, recipe=recipe),
)
line = executor.run_cmd(
    image=asked["image"], command="sleep infinity", container_name=asked["name"],
    env={**mounts.env, **asked["env"]}, volumes={**mounts.volumes, **asked["volumes"]},
)
print(json.dumps({"run": line, "prepare": generate_runtime_cache_script(mounts)}))
"""

_MOD = """
import json, sys
from sparkrun.core.bootstrap import get_runtime, init_sparkrun
from sparkrun.core.mods import ResolvedMod, _build_pre_exec_entries
from sparkrun.core.recipe import Recipe
from sparkrun.core.runtime_cache import build_runtime_cache_mounts, resolve_runtime_cache_settings
from sparkrun.orchestration.hooks import build_hook_launch_context, run_pre_exec
asked = json.load(sys.stdin)
init_sparkrun()
recipe = Recipe.load(asked["recipe"])
runtime = get_runtime(recipe.runtime)
mounts = build_runtime_cache_mounts(
    runtime=runtime, recipe=recipe, root=asked["cache"],
    settings=resolve_runtime_cache_settings(runtime=runtime, recipe=recipe),
)
entries = _build_pre_exec_entries(ResolvedMod(asked["mod"], asked["folder"], None))
context = build_hook_launch_context(
    ["localhost"], {}, recipe=recipe, runtime=recipe.runtime, runtime_cache=mounts
)
try:
    run_pre_exec([("localhost", asked["name"])], entries, {}, trust=True, launch_context=context)
except RuntimeError as error:
    sys.exit(str(error))
"""


@dataclass(frozen=True)
class Sparkrun:
    """sparkrun on this machine, with a recipe and a folder for its runtime caches."""

    engine: Engine
    image: str
    recipe: Path
    cache: Path
    home: Path

    @contextmanager
    def container(self, env: Mapping[str, str], **executor: str) -> Iterator[str]:
        """A container as it starts one; ``executor`` are further settings of its `-o`."""
        volumes, variables = authorities()
        name = f"sparkrun-test-{uuid.uuid4().hex[:8]}"
        told = self._ask(
            _LAUNCH,
            name=name,
            image=self.image,
            env={**variables, **env},
            volumes=volumes,
            executor={"accelerator_vendor": "cpu", "ulimit": [], **executor},
        )
        assert told.code == 0, told.err
        script = json.loads(told.out)
        assert "$(id -u):$(id -g)" in script["run"], "sparkrun starts it as who calls it"
        self._shell("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--",
                    script="set -e\n" + script["prepare"])  # fmt: skip
        self._shell(script=script["run"].replace("$(id -u):$(id -g)", f"{USER}:{USER}"))
        try:
            yield name
        finally:
            self.engine.run("rm", "--force", "--volumes", name)

    def mod(self, name: str, folder: Path) -> Done:
        """Copy a mod into a container and run it there, as before every start of a server."""
        return self._ask(_MOD, name=name, mod=folder.name, folder=str(folder))

    def _ask(self, program: str, **asked: object) -> Done:
        known = {"recipe": str(self.recipe), "cache": str(self.cache), **asked}
        python = environment(SPARKRUN, minor=12) / "python"
        done = subprocess.run(
            [python, "-c", program], input=json.dumps(known), text=True, capture_output=True,
            check=False, env={**self.engine.env, "HOME": str(self.home)},
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def _shell(self, *before: str, script: str) -> None:
        done = subprocess.run(
            [*before, "bash", "-s"], input=script, env=self.engine.env, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@contextmanager
def eugr_container(
    engine: Engine, image: str, kept: Path, env: Mapping[str, str], *, network: str = "host"
) -> Iterator[support.Modded]:
    """A container as spark-vllm-docker starts one: root, privileged, vLLM's cache mounted."""
    kept.mkdir(exist_ok=True)
    volumes, variables = authorities()
    words = ["--privileged", "--ipc=host", f"--network={network}", "--env=VLLM_HOST_IP=10.0.0.1"]
    words += [f"--volume={kept}:/root/.cache/vllm"]
    words += [f"--volume={outside}:{inside}" for outside, inside in volumes.items()]
    words += [f"--env={name}={value}" for name, value in {**variables, **env}.items()]
    with support.container(engine, image, *words) as held:
        yield support.Modded(engine, held)


def authorities() -> tuple[dict[str, str], dict[str, str]]:
    """What lets a container trust what this machine trusts: its volume and its variable."""
    file = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    return ({file: INSIDE}, {"SSL_CERT_FILE": INSIDE}) if file else ({}, {})
