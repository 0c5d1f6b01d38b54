"""A mod in a running container, started as the tools of the ecosystem start it."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from builder.common.programs import DISPATCH, IN_CONTAINER

from . import base, support
from .support import LINEAR, MOD, MOE, Cli, Modded

if TYPE_CHECKING:
    from pathlib import Path

    from .machine import Engine

ANCHOR = "vllm/envs.py"


def test_mod_succeeds_and_reports_its_changes(modded: Modded) -> None:
    done = modded.first.ok()
    said = done.err + done.out
    for layer in ("cutlass-dsl-cu13", "flashinfer-b12x", "vllm-b12x-backend", "b12x-env"):
        assert f"needed         {layer}:" in said
    assert "VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x" in said
    assert "start vLLM" in said or "--moe-backend flashinfer_b12x" in said


def test_kernels_are_selected_without_variables(engine: Engine, modded: Modded) -> None:
    """What the recipe exports is not seen here, so the variables must come with Python itself."""
    names = ("VLLM_NVFP4_GEMM_BACKEND", "CUTE_DSL_ARCH", "FLASHINFER_DISABLE_VERSION_CHECK")
    config = json.loads(engine.run("inspect", modded.held))[0]["Config"]
    assert not support.environment_of(config).keys() & set(names)
    engine.run("cp", DISPATCH.file(), f"{modded.held}:{IN_CONTAINER}")
    asks = [{"kind": "nvfp4-linear"}, {"kind": "nvfp4-moe", "moe_backend": "flashinfer_b12x"}]
    answer = subprocess.run(
        [engine.docker, "exec", "-i", modded.held, "python3", "-B", IN_CONTAINER],
        input=json.dumps({"ask": asks}), env=engine.env, text=True, capture_output=True, check=True,
    )  # fmt: skip
    result = json.loads(answer.stdout)
    assert result["fatal"] is None
    linear, moe = result["answers"]
    assert LINEAR in linear["lines"]
    assert any(line.startswith(MOE) for line in moe["lines"])


def test_variables_reach_every_python_and_can_be_overridden(engine: Engine, modded: Modded) -> None:
    show = "import os; print(os.environ.get('VLLM_NVFP4_GEMM_BACKEND'))"
    words = (modded.held, "python3", "-c", show)
    assert engine.run("exec", *words).strip() == "flashinfer-b12x"
    mine = ("--env", "VLLM_NVFP4_GEMM_BACKEND=marlin")
    assert engine.run("exec", *mine, *words).strip() == "marlin"


def test_package_metadata_matches_the_files(engine: Engine, modded: Modded) -> None:
    """An empty metadata folder of the older FlashInfer would do for Python to name no version."""
    show = (
        "import importlib.metadata as m; "
        "print([d.version for d in m.distributions() if d.name == 'flashinfer-python'])"
    )
    assert engine.run("exec", modded.held, "python3", "-c", show).strip() == "['0.6.9']"


def test_second_run_reports_no_changes(engine: Engine, modded: Modded) -> None:
    before = support.stamps(engine, modded.held)
    again = modded.run(MOD).ok()
    assert "applied        vllm-b12x-backend: receipt found" in again.err
    assert "needed" not in again.err
    assert "downloading" not in again.err
    after = support.stamps(engine, modded.held)
    ours = (".spark-build",)  # its lock
    assert not support.differences(support.without(after, *ours), support.without(before, *ours))


def test_drift_stops_the_start_and_writes_nothing(mod_container: Modded) -> None:
    held, engine = mod_container.held, mod_container.engine
    edit = f'sed -i \'s/"flashinfer-cudnn",/"flashinfer-cudnn2",/\' {base.SITE}/{ANCHOR}'
    engine.run("exec", held, "sh", "-c", edit)
    before = support.stamps(engine, held)
    done = mod_container.run(MOD)
    assert done.code == 4
    assert f"{ANCHOR}: " in done.err
    assert "drift" in done.err
    assert "error: layer vllm-b12x-backend" in done.err
    assert not support.differences(support.stamps(engine, held), before)


def test_layers_that_do_not_apply_are_not_a_failure(
    cli: Cli, mod_container: Modded, tmp_path: Path
) -> None:
    """It is up to date in its own way; the mod says why it does nothing, and vLLM starts."""
    words = ("--layers", "vllm-b12x-reachable", "--in", tmp_path)
    cli("mods", "export", "reachable", *words).ok()
    mod_container.copy(tmp_path / "reachable")
    done = mod_container.run("reachable")
    assert "not-applicable vllm-b12x-reachable: before 0.24.0" in done.err
    assert done.code == 0
    shown = mod_container.engine.run("exec", mod_container.held, "ls", "-A", base.SITE)
    assert ".spark-build" not in shown.split()


def test_mod_for_another_release_refuses(mod_container: Modded) -> None:
    """The image says that it is 0.19.1: the profile has nothing for that, and says what has."""
    old, new = f"vllm-{base.requirements()['vllm']}.dist-info", "vllm-0.19.1.dist-info"
    edit = (
        f"cd {base.SITE} && mv {old} {new} && "
        f"sed -i 's/^Version: .*/Version: 0.19.1/' {new}/METADATA"
    )
    mod_container.engine.run("exec", mod_container.held, "sh", "-c", edit)
    done = mod_container.run(MOD)
    assert done.code == 2
    assert "needs vllm >=0.20.0rc0, this is vllm 0.19.1" in done.err


def test_image_without_vllm(mod_container: Modded) -> None:
    gone = f"rm -r {base.SITE}/vllm-*.dist-info"
    mod_container.engine.run("exec", mod_container.held, "sh", "-c", gone)
    done = mod_container.run(MOD)
    assert done.code == 6
    assert "no Python here has vllm" in done.err


def test_index_out_of_reach(mod_container: Modded) -> None:
    dead = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "SPARK_BUILD_CACHE": "/tmp/empty"}
    before = support.stamps(mod_container.engine, mod_container.held)
    done = mod_container.run(MOD, env=dead)
    assert done.code == 8, done.err
    assert "error: cannot fetch" in done.err
    after = support.stamps(mod_container.engine, mod_container.held)
    assert not support.differences(after, before)


def test_a_cache_that_the_client_mounts_saves_the_download(
    modded: Modded, mod_container: Modded
) -> None:
    """spark-vllm-docker mounts vLLM's cache; the mod that ran before has filled the other one."""
    assert modded.first.code == 0
    fill = "mkdir -p /root/.cache/vllm && cp -r /var/cache/wheels /root/.cache/vllm/spark-build"
    mod_container.engine.run("exec", mod_container.held, "sh", "-c", fill)
    dead = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "SPARK_BUILD_CACHE": ""}
    done = mod_container.run(MOD, env=dead).ok()
    assert "needed         cutlass-dsl-cu13:" in done.err
    assert "downloading" not in done.err
