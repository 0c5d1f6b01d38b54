"""The command line as a user runs it, on released wheels.

What is made has a process of its own; what is refused, or checks files, is asked in this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import cache_dir

from .cli import Ran, called, spark_build
from .layouts import Layout
from .support import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

B12X_ON_0_20_1 = ("--layers", "b12x-full", "--base", "pypi:vllm==0.20.1")
README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
SITE = "usr/local/lib/python3.12/dist-packages"


# ------------------------------------------------------------------------------------------- plan


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """The same plan twice: here with the user's cache, there with none and another surrounding."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    other = {
        "SPARK_BUILD_CACHE": str(there / "cache"),
        "HOME": str(there),
        "TZ": "Pacific/Auckland",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "7",
    }
    words = ("plan", *B12X_ON_0_20_1, "--json")
    first = spark_build(*words, cwd=here, env={"SPARK_BUILD_CACHE": str(cache_dir())})
    return first, spark_build(*words, cwd=there, env=other)


def test_plan_json_has_the_promised_keys(plans: tuple[Ran, Ran]) -> None:
    plan = plans[0].json()
    assert plans[0].code == 0
    assert {"schema", "plan_digest", "base", "layers", "env"} <= plan.keys()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", plan["plan_digest"])
    assert plan["base"]["packages"]["vllm"] == "0.20.1"
    for layer in plan["layers"]:
        assert {"name", "state", "reason", "variant", "files"} <= layer.keys()
        for file in layer["files"]:
            assert not file["path"].startswith("/")
            assert file["before"] != file["after"]


def test_plan_json_is_in_order_of_application(plans: tuple[Ran, Ran]) -> None:
    layers = plans[0].json()["layers"]
    assert [layer["name"] for layer in layers] == [
        "cutlass-dsl-cu13",
        "cutlass-dsl-sm121a",
        "flashinfer-b12x",
        "flashinfer-sm121",
        "flashinfer-b12x-moe-barrier",
        "flashinfer-narrow-experts",
        "flashinfer-b12x-store-wait",
        "flashinfer-w4a16-store-wait",
        "flashinfer-b12x-moe-rows",
        "vllm-b12x-backend",
        "vllm-b12x-reachable",
        "vllm-linear-fallback",
        "vllm-b12x-experts-scales",
        "vllm-b12x-padding",
        "b12x-env",
    ]
    assert sum(layer["state"] == "needed" for layer in layers) == 10


def test_plan_is_the_same_everywhere(plans: tuple[Ran, Ran]) -> None:
    """Not only the digest: every byte, from another directory, home, cache, zone and hash seed."""
    first, second = plans
    assert first.json()["plan_digest"] == second.json()["plan_digest"]
    assert first.out == second.out


def test_plan_has_nothing_local(plans: tuple[Ran, Ran]) -> None:
    """No path of this machine, no host, no time of day."""
    text = plans[0].out
    for secret in (str(Path.cwd()), str(Path.home()), str(cache_dir()), socket.gethostname()):
        assert not re.search(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", text), secret
    assert not re.search(r"\d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT", text)
    assert "://" not in text


BARRIER, WAIT = "flashinfer-b12x-moe-barrier", "flashinfer-b12x-store-wait"
W4A16, NARROW = "flashinfer-w4a16-store-wait", "flashinfer-narrow-experts"
ROWS = "flashinfer-b12x-moe-rows"
#: The files of FlashInfer 0.6.18 and later that lack a barrier or a fence.
NEWER = [
    "gated.py", "generic.py", "moe_direct_micro_kernel.py", "moe_micro_kernel.py",
    "moe_w4a16_kernel.py",
]  # fmt: skip
OLDER = ("dynamic", "micro", "static", "w4a16")
#: What vLLM's own code lacks in every release, and the kernels do not; and up to 0.32.0.
EXPERTS = {"vllm-b12x-experts-scales": ["flashinfer_b12x_moe.py"]}
PADDING = {"vllm-b12x-padding": ["flashinfer_b12x_moe.py"]}


@pytest.mark.parametrize(
    ("release", "kernels"),
    [
        ("0.28.0", {BARRIER: [f"moe_{one}_kernel.py" for one in OLDER],
                    WAIT: ["dense_blockscaled_gemm_sm120_b12x.py"],
                    ROWS: ["moe_static_kernel.py"]}),
        ("0.30.0", {BARRIER: NEWER, NARROW: ["moe_dispatch.py"],
                    W4A16: ["dense_gemm_bf16_fp4_sm12x.py"]}),
        ("0.33.0", {BARRIER: NEWER, W4A16: ["dense_gemm_bf16_fp4_sm12x.py"]}),
    ],
)  # fmt: skip
def test_a_recent_release_needs_only_fixes_of_values(
    tmp_path: Path, release: str, kernels: dict[str, list[str]]
) -> None:
    words = ("plan", "--layers", "b12x-full", "--base", f"pypi:vllm=={release}", "--json")
    ran = called(*words, cwd=tmp_path)
    assert ran.code == 0
    needed = {
        layer["name"]: [file["path"].rpartition("/")[2] for file in layer["files"]]
        for layer in ran.json()["layers"]
        if layer["state"] == "needed"
    }
    padding = {} if release == "0.33.0" else PADDING
    assert needed == {**kernels, **EXPERTS, **padding, "b12x-env": []}
    if f"--base vllm/vllm-openai:v{release}" in README:
        number = ("one", "two", "three", "four", "five", "six")[sum(map(len, kernels.values())) - 1]
        flat = " ".join(README.split())
        assert f"`b12x-full` changes {number} files of its FlashInfer" in flat
        assert f"and {('one', 'two')[len(EXPERTS) - 1]} of vLLM, which rounds" in flat
    assert ran.json()["serve_flags"] == ["--linear-backend", "flashinfer_b12x"]


def test_the_quick_start_has_the_command_that_image_prints(tmp_path: Path) -> None:
    """The README's release, and its ``docker run``: that of ``image``, with a model and a name."""
    start = README.partition("## Quick start")[2].replace("\\\n", "")
    shown = next(line for line in start.splitlines() if line.startswith("docker run"))
    release = re.search(r"--base vllm/vllm-openai:v(\S+) --tag vllm-spark", start)
    assert release is not None
    words = ("image", "-l", "b12x-full", "-b", f"pypi:vllm=={release[1]}", "--engine", "oci")
    ran = called(*words, "-o", "oci:out", "--no-verify", "--json", cwd=tmp_path)
    said = ran.json()["run"]
    wanted = " ".join([said["command"], *said["moe_flags"]])
    wanted = re.sub(r"(?<=--entrypoint vllm )\S+", "vllm-spark", wanted)
    wanted = wanted.replace("docker run --rm", "docker run -d --name spark")
    wanted = wanted.replace("MODEL", "nvidia/Qwen3-30B-A3B-NVFP4 --gpu-memory-utilization 0.85")
    assert shown.split() == wanted.split()


def test_the_first_command_prints_what_the_readme_shows(tmp_path: Path) -> None:
    sample = README.partition("The output ends like this")[2].split("```")[1]
    ran = spark_build(
        "image", "--layers", "b12x-full", cwd=tmp_path, env={"COLUMNS": "100"}, timeout=900
    )
    assert ran.code == 0, ran.err
    lines = [*ran.err.splitlines(), *ran.out.splitlines()]
    for shown in sample.strip("\n").splitlines():
        pattern = ".*".join(map(re.escape, shown.split("...")))
        assert any(re.match(pattern, line) for line in lines), shown


def test_a_dry_run_writes_nothing_and_prints_the_digest_last(
    plans: tuple[Ran, Ran], tmp_path: Path
) -> None:
    ran = spark_build("image", *B12X_ON_0_20_1, "--engine", "oci", "--dry-run", cwd=tmp_path)
    assert ran.code == 0
    assert ran.last == plans[0].json()["plan_digest"]
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("release", "near"),
    [("0.20.7", "0.20.2"), ("0.22.2", "0.22.1"), ("0.99.0", "0.33.0"), ("0.24.1", "0.24.0")],
)
def test_a_release_that_does_not_exist(tmp_path: Path, release: str, near: str) -> None:
    """Exit 2, and the nearest releases: not the newest ones whatever was asked for."""
    words = ("plan", "--layers", "b12x-full", "--base", f"pypi:vllm=={release}")
    ran = called(*words, cwd=tmp_path)
    assert ran.code == 2
    assert f"vllm {release} is not on the package index" in ran.err
    assert re.search(rf"\b{re.escape(near)}\b", ran.err), ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--layers", "b12x-ful", "--base", "pypi:vllm==0.20.1"), 2, "did you mean 'b12x-full'"),
        (("--layers", "b12x-full", "--base", "pypi:vllm>=0.20.1"), 2, "is not NAME==VERSION"),
        (("--layers", "b12x-full", "--base", "pypi:flashinfer-python==0.6.9"), 2, "needs vllm=="),
        (("--layers", "b12x-full", "--base", "pypy:vllm==0.20.1"), 2, "did you mean 'pypi'"),
        (("--layers", "b12x-full", "--base", "pypi:vllm==0.17.1"), 2, "marlin"),
        (("--layers", "vllm-b12x-backend", "--base", "pypi:vllm==0.19.1"), 3, "nothing to do"),
        (("--layers", "b12x-env", "--base", "pypi:vllm==0.20.1"), 4, "not a choice of vllm 0.20.1"),
        (("--layers", "marlin,b12x-full", "--base", "pypi:vllm==0.20.1"), 2, "contradict each"),
        (("--layers", "marlin,b12x-full", "--base", "pypi:vllm==0.33.0"), 2, "contradict each"),
        ((*B12X_ON_0_20_1, "--platform", "linux/riscv64"), 2, "linux/riscv64"),
        ((*B12X_ON_0_20_1, "--python", "3.9"), 2, "no wheel for linux/arm64 with cp39"),
        ((*B12X_ON_0_20_1, "--patches", "nowhere"), 2, "nowhere does not exist"),
    ],
)
def test_each_refusal_has_its_exit_code_and_reason(
    tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    ran = called("plan", *words, cwd=tmp_path)
    assert ran.code == code, ran.err
    assert message in ran.err
    assert ran.err.count("error:") == 1


def test_errors_are_json_with_json(tmp_path: Path) -> None:
    words = ("plan", "--layers", "b12x-full", "--base", "pypi:vllm==0.20.7", "--json")
    ran = called(*words, cwd=tmp_path)
    assert ran.code == 2
    error = ran.json()["error"]
    assert error["code"] == 2
    assert "0.20.7" in error["message"]


# ------------------------------------------------------------------------------------------- image


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The image of b12x-full on 0.20.1, verified, with the user's cache."""
    place = tmp_path_factory.mktemp("built")
    words = ("image", *B12X_ON_0_20_1, "--engine", "oci", "--output", "oci:out")
    return place, spark_build(*words, cwd=place)


@pytest.fixture(scope="module")
def layout(built: tuple[Path, Ran]) -> Layout:
    """The layout of that image."""
    return Layout(built[0] / "out")


def test_the_last_line_of_stdout_names_the_image(built: tuple[Path, Ran], layout: Layout) -> None:
    """``IMG=$(spark-build image ...)`` works: stdout is that one line."""
    _, ran = built
    assert ran.code == 0, ran.err
    assert ran.out == f"oci:out@{layout.digest}\n"
    assert sorted(path.name for path in built[0].iterdir()) == ["out", "out.Dockerfile"]


def test_image_is_the_same_everywhere(layout: Layout, tmp_path: Path) -> None:
    """Another directory, an empty cache, another umask, zone and hash seed: the same bytes."""
    env = {
        "SPARK_BUILD_CACHE": str(tmp_path / "cache"),
        "TZ": "Asia/Kathmandu",
        "PYTHONHASHSEED": "11",
    }
    place = tmp_path / "deep" / "er"
    place.mkdir(parents=True)
    words = ("image", *B12X_ON_0_20_1, "--engine", "oci", "--output", "oci:image", "--no-verify")
    before = os.umask(0o077)
    try:
        ran = spark_build(*words, "--json", cwd=place, env=env)
    finally:
        os.umask(before)
    assert ran.code == 0, ran.err
    again = Layout(place / "image")
    assert again.digest == layout.digest == ran.json()["digest"]
    assert again.manifest["layers"] == layout.manifest["layers"]
    assert snapshot(again.root) == snapshot(layout.root)
    assert_image_json(ran.json())


def assert_image_json(value: Any) -> None:
    """The contract of ``image --json``; what was not verified does not claim to have passed."""
    keys = {"schema", "plan_digest", "image", "digest", "layers", "verify", "timings"}
    assert keys <= value.keys()
    assert value["verify"]["passed"] is False
    assert value["image"] == "oci:image"


def test_image_carries_its_plan_and_labels(plans: tuple[Ran, Ran], layout: Layout) -> None:
    baked = layout.files(layout.layer_with("usr/share/spark-build/plan.json"))
    plan = json.loads(baked["usr/share/spark-build/plan.json"])
    assert plan == {**plans[0].json(), "hints": []}, "hints are for who builds"
    config = layout.config
    assert config["architecture"] == "arm64"
    assert "VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x" in config["config"]["Env"]
    labels = config["config"]["Labels"]
    assert plan["plan_digest"] in labels.values()
    assert labels["io.github.spark-build.base-digest"] == plan["base"]["digest"]


# ------------------------------------------------------------------------------------------ verify


def verify(layout: Layout, *words: str) -> Ran:
    """Verify a layout by files alone, which takes a second."""
    return called(
        "verify", f"oci:{layout.root.name}", "--level", "static", *words, cwd=layout.root.parent
    )


def test_a_good_image_passes_every_level(layout: Layout) -> None:
    words = ("verify", "oci:out", "--json", "--require", "static,imports,dispatch")
    ran = spark_build(*words, cwd=layout.root.parent)
    assert ran.code == 0, ran.err
    report = ran.json()
    assert report["passed"] is True
    assert {"schema", "target", "passed", "checks"} <= report.keys()
    assert {check["level"] for check in report["checks"]} == {"static", "imports", "dispatch"}
    for check in report["checks"]:
        # the files below the overlay are not read
        wanted = "not-run" if check["name"] == "startup hooks" else "pass"
        assert check["status"] == wanted, check
        assert {"level", "name", "status", "expected", "seen", "where", "reason"} <= check.keys()


def test_a_good_image_passes_against_the_layers_too(layout: Layout) -> None:
    assert verify(layout, "--layers", "b12x-full").code == 0


def edit_file(layout: Layout) -> None:
    """A patched file is edited after the fact."""
    name = f"{SITE}/vllm/envs.py"
    number = layout.layer_with(name)
    layout.change_layer(number, {name: layout.files(number)[name] + b"# edited\n"})


def touch_another_file(layout: Layout) -> None:
    """A file of vLLM's that no layer concerns comes along."""
    number = layout.layer_with(f"{SITE}/vllm/envs.py")
    layout.change_layer(number, {f"{SITE}/vllm/version.py": b"# another\n"})


def bring_a_file_along(layout: Layout) -> None:
    """A file that no RECORD and no receipt knows, and that every Python would run."""
    number = layout.layer_with(f"{SITE}/vllm/envs.py")
    layout.change_layer(number, {f"{SITE}/extra.pth": b"import os\n"})


def break_syntax(layout: Layout) -> None:
    """A patched module is cut off."""
    name = f"{SITE}/vllm/envs.py"
    number = layout.layer_with(name)
    layout.change_layer(number, {name: b"def broken(:\n"})


def drop_setting(layout: Layout) -> None:
    """The image no longer sets a variable of the plan."""

    def change(config: Any) -> None:
        config["config"]["Env"] = [
            item for item in config["config"]["Env"] if not item.startswith("CUTE_DSL_ARCH")
        ]

    layout.change_config(change)


def drop_layer(layout: Layout) -> None:
    """A whole layer is gone."""
    layout.drop_layer(layout.layer_with(f"{SITE}/vllm/envs.py"))


def forge_receipt(layout: Layout) -> None:
    """A receipt is rewritten to match an edited file: the plan inside still says what it was."""
    name, receipt = f"{SITE}/vllm/envs.py", f"{SITE}/.spark-build/receipts/vllm-b12x-backend.json"
    number = layout.layer_with(name)
    files = layout.files(number)
    data = files[name] + b"# edited\n"
    value = json.loads(files[receipt])
    value["files"]["vllm/envs.py"]["after"] = hashlib.sha256(data).hexdigest()
    layout.change_layer(number, {name: data, receipt: json.dumps(value).encode()})


MUTATIONS: list[tuple[Callable[[Layout], None], str]] = [
    (edit_file, "layer vllm-b12x-backend"),
    (touch_another_file, "no other file touched"),
    (bring_a_file_along, "no other file touched"),
    (break_syntax, "patched modules parse"),
    (drop_setting, "environment"),
    (drop_layer, "layer vllm-b12x-backend"),
    (forge_receipt, "layer vllm-b12x-backend"),
]


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_consistent_but_changed_image_fails(
    layout: Layout, tmp_path: Path, mutate: Callable[[Layout], None], check: str
) -> None:
    """Every digest of the layout is right, so only what the files are can tell."""
    changed = layout.copy(tmp_path / "changed")
    mutate(changed)
    ran = verify(changed, "--json")
    assert ran.code == 5, ran.err
    failed = [c["name"] for c in ran.json()["checks"] if c["status"] == "fail"]
    assert check in failed


def test_a_module_with_a_syntax_error_is_a_failed_check(layout: Layout, tmp_path: Path) -> None:
    """At the level that follows imports too: a finding about the image, not a bug of ours."""
    changed = layout.copy(tmp_path / "changed")
    break_syntax(changed)
    ran = verify(changed, "--level", "imports", "--json")
    assert ran.code == 5, ran.err
    failed = [c["level"] for c in ran.json()["checks"] if c["status"] == "fail"]
    assert {"static", "imports"} <= set(failed)


def test_a_damaged_blob_is_refused(layout: Layout, tmp_path: Path) -> None:
    changed = layout.copy(tmp_path / "changed")
    digest = changed.manifest["layers"][-1]["digest"]
    data = bytearray(changed.path(digest).read_bytes())
    data[len(data) // 2] ^= 1
    changed.path(digest).unlink()
    changed.path(digest).write_bytes(data)
    ran = verify(changed)
    assert ran.code == 2
    assert f"blob {digest} is damaged" in ran.err


def test_a_missing_blob_is_refused(layout: Layout, tmp_path: Path) -> None:
    changed = layout.copy(tmp_path / "changed")
    digest = changed.manifest["layers"][0]["digest"]
    changed.path(digest).unlink()
    ran = verify(changed)
    assert ran.code == 2
    assert digest in ran.err


@pytest.mark.parametrize("text", ["", "{", "{}", '{"manifests": []}', '{"manifests": [1]}'])
def test_an_invalid_layout_is_refused(layout: Layout, tmp_path: Path, text: str) -> None:
    changed = layout.copy(tmp_path / "changed")
    (changed.root / "index.json").unlink()
    (changed.root / "index.json").write_text(text)
    ran = verify(changed)
    assert ran.code == 2
    assert "changed" in ran.err


def test_an_unpatched_release_fails_against_the_layers(tmp_path: Path) -> None:
    words = ("verify", "pypi:vllm==0.20.1", "--layers", "b12x-full")
    ran = called(*words, cwd=tmp_path)
    assert ran.code == 5
    assert "layer vllm-b12x-backend is missing" in ran.err
    assert "Invalid value 'flashinfer-b12x' for VLLM_NVFP4_GEMM_BACKEND" in ran.err
    assert "without these settings it is: FlashInferCutlassNvFp4LinearKernel" in ran.err


def test_verifying_wheels_needs_layers(tmp_path: Path) -> None:
    ran = called("verify", "pypi:vllm==0.20.1", cwd=tmp_path)
    assert ran.code == 2
    assert "--layers" in ran.err


def test_the_static_level_makes_no_sandbox(tmp_path: Path) -> None:
    """A check of files must not cost the download of a torch."""
    words = ("verify", "pypi:vllm==0.20.1", "--layers", "b12x-full", "--level", "static")
    ran = spark_build(*words, cwd=tmp_path, env={"SPARK_BUILD_CACHE": str(tmp_path / "cache")})
    assert ran.code == 5
    assert not (tmp_path / "cache" / "sandbox").exists()
