"""`spark-build image` and `verify` on a real image, and what is said of a broken one."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from builder.images.engines.maker import programs
from builder.probes import TERMS
from tests.stack import APPLIED

from . import base, machine, support
from .support import LINEAR, MOE, PROFILE, SHARE, Built, Cli, Done

if TYPE_CHECKING:
    from collections.abc import Iterator

MMA = "nvidia_cutlass_dsl/python_packages/cutlass/cute/nvgpu/warp/mma.py"
KERNELS = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
B12X = "FlashInferB12xNvFp4LinearKernel"
BY_DEFAULT = "FlashInferCutlassNvFp4LinearKernel"
ENV = {
    "CUTE_DSL_ARCH": "sm_121a",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "VLLM_NVFP4_GEMM_BACKEND": "flashinfer-b12x",
}
BAKED = {
    "plan.json": 0o644,
    "layers.json": 0o644,
    "serve-flags.json": 0o644,
    "device.json": 0o644,
    "files.json": 0o644,
    **dict.fromkeys((*programs(), *TERMS), 0o644),
}


# --- ways to break a good image: what stands below FROM ----------------------------------------

#: A module without one of its classes, and still good Python.
CUT = (
    f"import pathlib, re; path = pathlib.Path('{base.SITE}/{KERNELS}'); text = path.read_text(); "
    f"path.write_text(re.sub(r'(?ms)^class {B12X}\\b.*?(?=^\\S|\\Z)', '', text))"
)
ALL_LEVELS = "static,imports,dispatch"


@dataclass(frozen=True)
class Damage:
    """How an image is broken, and which checks must say so, and no others."""

    dockerfile: str
    flipped: frozenset[str]
    levels: str = ALL_LEVELS


#: RECORD says what a layer left, so it tells of a file that is as before too.
UNTOUCHED = frozenset({"static no other file touched"})
MMA_LAYERS = frozenset({"static layer cutlass-dsl-cu13", "static layer cutlass-dsl-sm121a"})
BROKEN = {
    # One file as the base has it: what cutlass-dsl-sm121a changed is undone.
    "mma-put-back": Damage(
        f"COPY --from={{base}} {base.SITE}/{MMA} {base.SITE}/{MMA}",
        MMA_LAYERS | UNTOUCHED,
        "static,imports",
    ),
    # All files of libs-base on top again, as a later pip install of it leaves them.
    "dsl-reinstalled": Damage(
        f"COPY --from={{base}} {base.SITE}/nvidia_cutlass_dsl {base.SITE}/nvidia_cutlass_dsl",
        MMA_LAYERS | UNTOUCHED | {"static imported modules"},  # with the compiled files of pip
        "static",
    ),
    "class-removed": Damage(
        f"RUN {json.dumps(['python3', '-c', CUT])}",
        frozenset(
            {
                "static layer vllm-b12x-backend",
                *UNTOUCHED,
                "imports names used by vllm/model_executor/kernels/linear/__init__.py",
                *(f"dispatch {kind}-linear" for kind in ("nvfp4", "fp8", "w4a16")),
                "dispatch fp8-block",
            }
        ),
    ),
    # Such an image selects FlashInfer CUTLASS, whatever its plan says.
    "env-changed": Damage(
        "ENV VLLM_NVFP4_GEMM_BACKEND=flashinfer-cutlass",
        frozenset({"static environment", "dispatch nvfp4-linear"}),
        "static,dispatch",
    ),
}


@pytest.fixture(scope="module")
def verdicts(
    cli: Cli, engine: machine.Engine, base_image: str, patched: str
) -> Iterator[dict[str, Future[Done]]]:
    """Every verification of this module, two at a time: one takes up to 15 seconds."""
    build = Built(engine)

    def broken(name: str) -> Done:
        damage = BROKEN[name]
        text = f"FROM {patched}\n{damage.dockerfile.format(base=base_image)}\n"
        return cli("verify", build(f"broken:{name}", text), "--level", damage.levels, "--json")

    layers = ("--layers", PROFILE, "--json")
    with ThreadPoolExecutor(2) as pool:
        yield {
            "good": pool.submit(cli, "verify", patched, "--level", "static,imports"),
            "inside": pool.submit(_inside, engine, patched),
            "good-layers": pool.submit(cli, "verify", patched, *layers, "--level", "static"),
            "unpatched": pool.submit(cli, "verify", base_image, *layers),
            **{name: pool.submit(broken, name) for name in BROKEN},
        }
    build.remove()


def _inside(engine: machine.Engine, image: str) -> Done:
    """The verifier that the image carries, as its user runs it."""
    words = ("run", "--rm", "--network=none", "--entrypoint", "spark-verify", image)
    return Done(0, engine.run(*words), "")


# --- the image ------------------------------------------------------------------------------


def test_json_has_the_documented_keys(built: Done) -> None:
    value = built.json
    assert value.keys() >= {
        "schema", "plan_digest", "image", "digest", "layers", "verify", "timings"
    }  # fmt: skip
    assert value["schema"] == 1
    assert {layer["name"] for layer in value["layers"] if layer["state"] == "needed"} == {*APPLIED}
    assert value["verify"]["passed"] is True
    assert value["timings"].keys() >= {"plan", "build", "verify"}
    for check in value["verify"]["checks"]:
        assert check.keys() >= {"level", "name", "status", "expected", "seen", "where", "reason"}


def test_vllm_in_the_image_logs_the_selected_kernels(built: Done) -> None:
    checks = {c["name"]: c for c in built.json["verify"]["checks"] if c["level"] == "dispatch"}
    assert checks["nvfp4-linear"]["seen"] == LINEAR
    assert checks["nvfp4-moe"]["seen"].startswith(MOE)
    assert all(check["status"] == "pass" for check in checks.values())
    assert all("sandbox" not in part for c in checks.values() for part in c["simulated"])
    assert LINEAR in built.err


@pytest.fixture(scope="module")
def again(cli: Cli, built: Done, built_tree: support.Tree, base_image: str) -> Done:
    """The same once more, for people; what the first run made has been looked at before."""
    return cli("image", "--layers", PROFILE, "--base", base_image, "--no-verify").ok()


def test_last_line_of_stdout_names_the_same_plan_and_the_same_files(
    engine: machine.Engine, built: Done, built_tree: support.Tree, again: Done
) -> None:
    name, _, digest = again.last.partition("@")
    assert name == built.json["image"]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert name.endswith(built.json["plan_digest"].removeprefix("sha256:")[:12])
    assert built.json["plan_digest"] in again.err
    after = support.tree_in_image(engine, again.last)
    assert not support.differences(built_tree, after)
    assert len(after) > 40_000


def test_same_plan_has_the_same_digest(built: Done, again: Done) -> None:
    """Else the name that an earlier run gave, digest and all, would be good for nothing now."""
    assert again.last == f"{built.json['image']}@{built.json['digest']}"


def test_labels_and_environment(engine: machine.Engine, built: Done, base_image: str) -> None:
    config = support.inspect(engine, built.json["image"])["Config"]
    was = support.inspect(engine, base_image)
    labels = config["Labels"]
    assert labels["org.opencontainers.image.base.name"] == f"docker.io/{base_image}"
    assert labels["org.opencontainers.image.base.digest"] == was["Id"]
    assert labels["org.opencontainers.image.version"] == base.requirements()["vllm"]
    ours = {k.rpartition(".")[2]: v for k, v in labels.items() if "spark-build." in k}
    assert ours["plan"] == built.json["plan_digest"]
    assert ours["layers"].split(",") == [*APPLIED]
    states = {layer["name"]: layer["state"] for layer in built.json["layers"]}
    assert json.loads(ours["states"]) == states
    environment = support.environment_of(config)
    assert environment == support.environment_of(was["Config"]) | ENV
    kept = ("Entrypoint", "Cmd", "WorkingDir", "User")
    assert {key: config[key] for key in kept} == {key: was["Config"][key] for key in kept}


def test_baked_files(engine: machine.Engine, built: Done) -> None:
    image = built.json["image"]
    tree = support.tree_in_image(engine, image, SHARE)
    assert {path: mode for path, (_, mode, _) in tree.items()} == BAKED
    said = support.script(
        engine, image, f"cat {SHARE}/plan.json; stat -c %a /usr/local/bin/spark-*"
    )
    plan, end = json.JSONDecoder().raw_decode(said)
    assert plan["plan_digest"] == built.json["plan_digest"]
    assert [layer["name"] for layer in plan["layers"]] == [
        layer["name"] for layer in built.json["layers"]
    ]
    assert said[end:].strip() == "755"
    metadata = support.script(engine, image, "cat /workspace/build-metadata.yaml")
    assert f'vllm_version: "{base.requirements()["vllm"]}"' in metadata
    assert built.json["plan_digest"] in metadata


def test_base_image_is_unchanged(engine: machine.Engine, built: Done, base_image: str) -> None:
    """Its files are those that its packages record, and no layer or label was added to it."""
    layout = machine.base_layout(engine.tools)
    layout_digest, manifest = support.layout_manifest(layout)
    config = support.layout_json(layout, manifest["config"])
    seen = support.inspect(engine, base_image)
    assert seen["Id"] == layout_digest
    assert seen["RootFS"]["Layers"] == config["rootfs"]["diff_ids"]
    image = support.inspect(engine, built.json["image"])
    assert image["RootFS"]["Layers"][: len(seen["RootFS"]["Layers"])] == seen["RootFS"]["Layers"]


def test_engine_has_no_leftovers(engine: machine.Engine, built: Done, base_image: str) -> None:
    others = (*machine.KEPT, "broken:")
    names = {name for name in support.tags(engine) if not name.startswith(others)}
    assert names == {built.json["image"]}
    assert not support.containers(engine)


def test_dry_run_builds_nothing(
    cli: Cli, engine: machine.Engine, built: Done, base_image: str
) -> None:
    before = support.tags(engine)
    words = ("image", "--layers", PROFILE, "--base", base_image, "--tag", "never:built")
    plain = cli(*words, "--dry-run").ok()
    assert plain.last == built.json["plan_digest"]
    assert support.tags(engine) == before
    assert not support.containers(engine)


def test_print_dockerfile(cli: Cli, engine: machine.Engine, built: Done, base_image: str) -> None:
    before = support.tags(engine)
    text = cli("image", "--layers", PROFILE, "--base", base_image, "--print-dockerfile").ok().out
    assert text.splitlines()[0] == f"FROM {base_image}@{support.inspect(engine, base_image)['Id']}"
    for name, value in ENV.items():
        assert f'ENV {name}="{value}"' in text
    assert "syntax=" not in text
    assert support.tags(engine) == before
    engine.run("image", "inspect", text.splitlines()[0].removeprefix("FROM "))


# --- verification ---------------------------------------------------------------------------


def test_verifies_from_outside(verdicts: dict[str, Future[Done]], patched: str) -> None:
    done = verdicts["good"].result().ok()
    assert done.out.strip() == f"verified {patched}"
    assert re.search(r"PASS    static   \d+ checks", done.err)
    assert " 0 fail, 1 not run" in done.err, "startup hooks: the layers are not read"


def test_verifies_against_layers(verdicts: dict[str, Future[Done]]) -> None:
    done = verdicts["good-layers"].result().ok()
    assert done.json["passed"] is True
    assert not done.checks("fail")
    assert done.checks("not-run") == {"static startup hooks"}
    assert {f"static layer {name}" for name in APPLIED} <= done.checks("pass")


def test_verifies_from_inside(verdicts: dict[str, Future[Done]], built: Done) -> None:
    said = verdicts["inside"].result().out
    assert "FAIL" not in said
    assert f"PASS    dispatch nvfp4-linear: {LINEAR}" in said
    assert f"PASS    dispatch nvfp4-moe: {MOE}" in said
    unproven = "NOT PROVEN, device, serve did not run"
    assert said.strip().splitlines()[-1] == f"plan {built.json['plan_digest']}: {unproven}"


def test_unpatched_image_is_distinguished_from_a_patched_one(
    verdicts: dict[str, Future[Done]],
) -> None:
    done = verdicts["unpatched"].result()
    assert done.code == 5
    assert {f"static layer {name}" for name in APPLIED} <= done.checks("fail")
    checks: dict[str, Any] = {c["name"]: c for c in done.json["checks"]}
    linear = checks["nvfp4-linear"]
    assert linear["status"] == "fail"
    assert "flashinfer-b12x" in linear["seen"]
    assert "VLLM_NVFP4_GEMM_BACKEND" in linear["seen"]
    assert linear["reason"].endswith(f": {BY_DEFAULT}")
    assert checks["nvfp4-moe"]["status"] == "fail"
    assert checks["no other file touched"]["status"] == "pass"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_image_fails_the_matching_check(
    verdicts: dict[str, Future[Done]], built: Done, name: str
) -> None:
    done = verdicts[name].result()
    damage = BROKEN[name]
    assert done.checks("fail") == damage.flipped
    levels = damage.levels.split(",")
    was = {f"{c['level']} {c['name']}" for c in built.json["verify"]["checks"]
           if c["level"] in levels}  # fmt: skip
    not_seen = done.checks("not-run")
    assert not_seen <= {"static startup hooks"}, "the layers of an engine's image are not read"
    assert done.checks("pass") == was - damage.flipped - not_seen
    assert done.code == 5, done.err
    assert done.json["passed"] is False
