"""CUDA hunks of pull requests under ``--compile``; the compiler itself is replaced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.layers import Pull
from builder.applier.machinecode import KernelCode
from builder.applier.states import Target
from builder.applier.values import sha256_hex
from builder.common import machinecode
from builder.common.diffs import read_sections
from builder.common.document import plain
from builder.compile import stage as stage_module
from builder.compile.toolchain import Compiler
from builder.layers.pulls import ops_of, parts_of
from tests.unit import cudaworld as cw
from tests.unit.applier.test_compile_op import NOT_LOADED, TEXT
from tests.unit.fakes import dist_files, make_wheel, snapshot, write_tree
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from builder.common.plan import StageRequest
    from tests.forge import LocalForge
    from tests.unit.conftest import Called

    Call = Callable[..., Called]

BASE = ("-b", f"pypi:vllm=={cw.RELEASE}")
ARCHIVE = f"vllm-{cw.RELEASE}.tar.gz"


def named(*numbers: int) -> list[str]:
    return [word for n in numbers for word in ("--with-pr", f"vllm-project/vllm#{n}")]


@pytest.fixture(scope="session")
def cuda_world(folders: Path) -> cw.CudaWorld:
    return cw.make_cuda_world(folders / "cuda")


@pytest.fixture(autouse=True)
def cuda_forge(
    cuda_world: cw.CudaWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[LocalForge]:
    """Forge and index of the small vLLM, on a machine of the base's architecture with nvcc."""
    here = Target("linux/arm64", "cp312")
    monkeypatch.setattr(Target, "here", lambda: here)
    versions = {"nvcc": "13.0.88", "host": "12.2.0"}
    nvcc = Compiler(nvcc=tmp_path / "nvcc", cuda="13.0", versions=versions)
    monkeypatch.setattr(stage_module, "find_compiler", lambda *_: nvcc)
    monkeypatch.setattr(stage_module, "header_wheels", lambda *_: [])
    monkeypatch.setattr(stage_module, "refuse_cpu_torch", lambda *_: None)
    monkeypatch.setattr(machinecode, "read_module", lambda *_: NOT_LOADED)
    monkeypatch.setattr(stage_module, "free_here", lambda: (64.0, 100.0, tmp_path))
    with FakeIndex() as index, cuda_world.forge() as forge:
        cuda_world.publish(index)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("SPARK_BUILD_FORGE", forge.root)
        yield forge


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled: requests, and the sources that the compiler would have seen."""
    from builder.compile import stage

    ran: list[Any] = []

    def build(request: StageRequest, work: Any, *_: object) -> Path:
        ran.append((request, dict(work.plan.sources.texts)))
        package = f"spark_build_companion_{request.change.replace('-', '_')}"
        about = {"operators": [{"name": name} for name in request.operators]}
        wheel = make_wheel(
            package.replace("_", "-"),
            f"{cw.RELEASE}+abc",
            {
                f"{package}/__init__.py": "def load():\n    pass\n",
                f"{package}/companion.json": json.dumps(about),
                f"{package}/kernels.so": sha256_hex(json.dumps(plain(request)).encode()),
            },
        )
        file = stage._folder(request) / wheel.filename
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(wheel.data)
        return file

    monkeypatch.setattr(stage, "build", build)
    return ran


@pytest.fixture
def plan(spark_build: Call) -> Callable[..., Called]:
    def planned(*numbers: int, more: tuple[str, ...] = ("--json",)) -> Called:
        return spark_build("plan", *named(*numbers), *BASE, "--compile", *more)

    return planned


def states(called: Called) -> dict[str, str]:
    return {layer["name"]: layer["state"] for layer in called.json["layers"]}


def compiled(called: Called, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = called.json["layers"][number]["compile"]
    return found


# ------------------------------------------------------------------------------- one pull request


def test_without_a_stage_the_error_names_the_command(spark_build: Call) -> None:
    result = spark_build("plan", *named(cw.FAMILY), *BASE)
    assert result.code == 10
    said = "--with-pr 'vllm-project/vllm#1' --base docker://vllm/vllm-openai:v0.19.1 --compile"
    assert said in result.err
    result = spark_build("plan", *named(cw.FAMILY), *BASE, "--json")
    assert (states(result), compiled(result)) == ({"pr-vllm-1": "needs-rebuild"}, {"wheel": None})


def test_its_cuda_hunks_become_a_stage(
    plan: Call, cuda_world: cw.CudaWorld, built: list[Any]
) -> None:
    result = plan(cw.FAMILY)
    assert (states(result), result.code) == ({"pr-vllm-1": "needed"}, 0)
    found = compiled(result)
    stage = found["stage"]
    before, after = (
        sha256_hex(cuda_world.repository.read(commit, cw.DISPATCH))
        for commit in (f"v{cw.RELEASE}", cuda_world.pulls[cw.FAMILY].head)
    )
    assert stage["files"] == [{"path": cw.DISPATCH, "before": before, "after": after}]
    assert [unit["path"] for unit in stage["units"]] == [cw.FP8, *cw.BETWEEN]
    assert stage["operators"] == ["_C::cutlass_scaled_mm"]
    assert stage["module"] == sha256_hex(cw.EXTENSION)
    assert stage["inputs"][0]["filename"] == ARCHIVE
    (report,) = result.json["pulls"]
    (pinned,) = stage["pulls"]
    assert (pinned["commit"], pinned["sha256"]) == (report["commit"], report["sha256"])
    assert found["sources"]["found"] == "to-compile"
    assert built == []


def test_an_image_has_the_compiled_code_and_the_python_changes(
    spark_build: Call, plan: Call, cuda_forge: LocalForge, built: list[Any], tmp_path: Path
) -> None:
    from builder.images.engines.oci import read_layout

    planned = plan(cw.BOTH).json
    said = planned["layers"][0]["reason"]
    assert said.startswith("pr-vllm-3 compiled for 12.1a: ")
    assert said.endswith("; 1 file to change as well")
    words = ("--engine", "oci", "-o", "oci:out", "--compile")
    result = spark_build("image", *named(cw.BOTH), *BASE, *words, "--no-verify", "--json")
    assert (result.code, result.json["plan_digest"]) == (0, planned["plan_digest"])
    ((_, sources),) = built
    assert cw.FAMILY_LINE.encode() in sources[cw.DISPATCH]
    recorded, files, _ = read_layout(tmp_path / "work" / "out")
    baked = recorded.document
    paths = {file.path for file in baked.layers[0].files}
    package = "spark_build_companion_pr_vllm_3"
    assert {"vllm/kernels.py", f"{package}/kernels.so"} <= paths
    site = baked.base.site_packages
    assert b"second = 22" in (files[f"{site}/vllm/kernels.py"] or b"")
    cuda_forge.__exit__()
    again = spark_build("rebuild", "oci:out", "--json")
    assert (again.code, again.json["same"]) == (0, True)
    assert len(built) == 1, "what was compiled is kept"


def test_a_dry_run_prints_the_cost(spark_build: Call, built: list[Any]) -> None:
    result = spark_build("image", *named(cw.FAMILY), *BASE, "--compile", "--dry-run")
    assert result.code == 0
    said = " ".join(result.err.split())
    assert f"compile: of {ARCHIVE}, with nvcc 13.0.88: 5 units" in said
    assert cw.FP8 in said
    assert built == []


def test_a_locked_pull_request_is_planned_without_a_forge(
    spark_build: Call, cuda_forge: LocalForge, cuda_world: cw.CudaWorld
) -> None:
    assert spark_build("lock", *named(cw.FAMILY), *BASE).code == 0
    cuda_forge.pulls[cw.FAMILY].head = cuda_world.pulls[cw.TILE].head
    cuda_forge.requests.clear()
    words = ("plan", *named(cw.FAMILY), *BASE, "--compile", "--json")
    result = spark_build(*words, "--locked")
    assert (result.code, states(result)) == (0, {"pr-vllm-1": "needed"})
    assert compiled(result)["stage"]["pulls"][0]["commit"] == cuda_world.pulls[cw.FAMILY].head
    assert cuda_forge.requests == []


def test_a_layer_of_it_becomes_a_stage_too(spark_build: Call) -> None:
    words = ("--in", "layers", "--from-pr", "vllm-project/vllm#3")
    assert spark_build("layers", "new", "mine", *words).code == 0
    result = spark_build("plan", "-l", "mine", "--patches", "layers", *BASE, "--compile", "--json")
    assert states(result) == {"mine": "needed"}
    assert compiled(result)["stage"]["change"] == "pr-vllm-3"


def test_a_mod_refuses_a_change_that_must_be_compiled(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path
) -> None:
    from builder.applier.applying import apply_layers
    from builder.applier.layers import Layer
    from builder.applier.sources import PipSources
    from builder.applier.values import ApplyError

    assert spark_build("mods", "export", "m", *named(cw.BOTH), "--in", "mods").code == 0
    bundle = json.loads((tmp_path / "work/mods/m/layers.json").read_text())
    layers = [Layer.read(one) for one in bundle["layers"]]
    site = write_tree(tmp_path / "site", installed(cuda_world))
    before = snapshot(site)
    target = Target("linux/arm64", "cp312")
    with pytest.raises(ApplyError, match=r"reach vllm compiled") as caught:
        apply_layers(site, layers, PipSources(), target)
    assert caught.value.code == 10
    assert snapshot(site) == before


# ------------------------------------------------------------------ what the sources say of it

STATES = {
    "other-chips": (cw.ROCM_ONLY, "not-applicable", 3, "no effect on SM121"),
    "a-comment": (cw.COMMENT_ONLY, "not-applicable", 3, "no effect on SM121"),
    "in-the-archive": (cw.BACKPORTED, "upstream", 0, "is as released, built from it"),
    "partly-in-it": (cw.PARTLY, "drift", 4, "scaled_mm_blockwise_sm120_fp8.cu already patched"),
    "conflict": (cw.CONFLICT, "drift", 4, f"(in {ARCHIVE})"),
    "unknown-operator": (cw.UNKNOWN, "needs-rebuild", 10, "csrc/topk.cu: which torch operator"),
    "new-operator": (cw.NEW_OPERATOR, "needs-rebuild", 10, "fresh are new"),
    "declarations": (
        cw.DECLARATIONS,
        "needs-rebuild",
        10,
        "it reaches csrc/torch_bindings.cpp through csrc/ops.h",
    ),
    "new-unit": (cw.NEW_UNIT, "needs-rebuild", 10, "csrc/fresh.cu: which torch operator"),
    "defines": (cw.DEFINES, "needs-rebuild", 10, "declares the operators of _C"),
    "other-sources": (cw.REVISION, "needs-rebuild", 10, 'set(CUTLASS_REVISION "v4.2.1")'),
    "taken-out": (cw.TAKEN_OUT, "needs-rebuild", 10, "removes csrc/topk.cu from the build"),
    "trap": (cw.TILE, "needs-rebuild", 10, "enable_sm120_only"),
    "rust": (cw.RUST, "needs-rebuild", 10, "rust/lib.rs are not compiled by nvcc"),
}


@pytest.mark.parametrize(("number", "state", "code", "reason"), STATES.values(), ids=STATES.keys())
def test_state_of_each_kind_of_change(
    plan: Call, number: int, state: str, code: int, reason: str
) -> None:
    result = plan(number)
    (layer,) = result.json["layers"]
    assert (layer["state"], result.code) == (state, code), layer["reason"]
    assert reason in layer["reason"]
    assert "--compile" not in result.json.get("error", {}).get("hint", "")


def test_the_cost_of_the_whole_extension_is_reported(plan: Call) -> None:
    err = " ".join(plan(cw.UNKNOWN, more=()).err.split())
    assert "without it all of _C has to be compiled, not 1 of 7 units" in err
    assert "note: build vllm 0.19.1 from its sources with the change" in err


def test_a_trap_is_known_before_it_is_compiled(plan: Call) -> None:
    err = " ".join(plan(cw.TILE, more=()).err.split())
    assert f"{cw.FP8} is compiled for sm_121a, where enable_sm120_only in {cw.DISPATCH}" in err
    assert "add --layers sm120-family" in err


def test_hunks_without_effect_leave_the_others_to_be_applied(plan: Call) -> None:
    for number in (cw.ROCM_AND_PYTHON, cw.ROCM_CONFLICT):
        result = plan(number)
        (layer,) = result.json["layers"]
        assert (layer["state"], result.code) == ("needed", 0)
        assert [file["path"] for file in layer["files"]] == ["vllm/kernels.py"]
        assert layer["compile"]["sources"]["unreached"] == ["csrc/rocm/attention.cu"]
        assert any("comes from csrc/rocm/attention.cu" in note for note in layer["notes"])


def test_python_hunks_are_applied_if_the_archive_has_the_others(plan: Call) -> None:
    result = plan(cw.BACKPORTED_AND_PYTHON)
    (layer,) = result.json["layers"]
    assert (layer["state"], result.code) == ("needed", 0)
    assert [file["path"] for file in layer["files"]] == ["vllm/kernels.py"]
    assert layer["compile"]["sources"]["found"] == "there"
    assert any("is as released, built from it" in note for note in layer["notes"])


def test_a_base_without_the_extension_is_refused(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path
) -> None:
    site = write_tree(tmp_path / "site-packages", installed(cuda_world))
    (site / "vllm/_C.abi3.so").unlink()
    words = ("plan", *named(cw.FAMILY), "-b", f"dir:{site}", "--compile", "--json")
    result = spark_build(*words)
    assert (states(result), result.code) == ({"pr-vllm-1": "needs-rebuild"}, 10)
    assert "the base has no vllm/_C for it to extend" in result.json["error"]["message"]


def test_changes_for_two_architectures_are_not_compiled_together(
    spark_build: Call, tmp_path: Path
) -> None:
    text = TEXT.replace("12.1a", "12.0f").encode()
    write_tree(tmp_path / "work" / "layers", {"mine/layer.toml": text})
    words = ("plan", "-l", "mine", "--patches", "layers", *named(cw.FAMILY), *BASE, "--compile")
    result = spark_build(*words)
    assert result.code == 2
    assert "compiled together, but name 12.0f and 12.1a" in result.err


def test_an_image_with_two_stages_is_rebuilt(spark_build: Call, built: list[Any]) -> None:
    words = ("--engine", "oci", "-o", "oci:out", "--compile", "--no-verify")
    assert spark_build("image", *named(cw.ROCM_AND_PYTHON), *BASE, *words).code == 0
    result = spark_build("rebuild", "oci:out", "--json")
    assert (result.code, result.json["same"], built) == (0, True, [])
    words = ("verify", "oci:out", "--level", "static", "--prove-necessary", "--json")
    (verdict,) = spark_build(*words).json["necessity"]
    assert verdict["reason"].startswith("no check fails without it (static)")


def installed(world: cw.CudaWorld, version: str = cw.RELEASE) -> dict[str, bytes]:
    """The release as it is installed."""
    return dist_files("vllm", version, world.files()) | dist_files("torch", "2.10.0", {})


def test_a_base_between_releases_is_compared_with_its_commit(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path
) -> None:
    commit = cuda_world.repository.git("rev-parse", f"v{cw.RELEASE}")
    files = installed(cuda_world, f"0.19.2.dev3+g{commit[:9]}")
    site = write_tree(tmp_path / "site-packages", files)
    words = ("-b", f"dir:{site}", "--compile", "--json")
    result = spark_build("plan", *named(cw.FAMILY), *words)
    source = compiled(result)["stage"]["inputs"][0]["filename"]
    assert (states(result), source.partition("@")[2]) == ({"pr-vllm-1": "needed"}, commit)
    result = spark_build("plan", *named(cw.BACKPORTED), *words)
    assert (states(result), result.code) == ({"pr-vllm-7": "needs-rebuild"}, 10)
    assert "is not from a released wheel" in result.json["error"]["message"]


def test_a_foreign_binary_makes_the_state_unknown(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path
) -> None:
    site = write_tree(tmp_path / "site-packages", installed(cuda_world))
    words = ("plan", *named(cw.BACKPORTED), "-b", f"dir:{site}", "--compile", "--json")
    result = spark_build(*words)
    assert states(result) == {"pr-vllm-7": "upstream"}
    (site / "vllm/_C.abi3.so").write_bytes(b"built by hand")
    result = spark_build(*words)
    assert (states(result), result.code) == ({"pr-vllm-7": "needs-rebuild"}, 10)
    assert "its sources are unknown" in result.json["error"]["message"]
    (site / "vllm/_C.abi3.so").unlink()
    assert "there is none" in spark_build(*words).json["error"]["message"]


def test_a_conflict_shows_both_texts(plan: Call) -> None:
    result = plan(cw.CONFLICT)
    (conflict,) = result.json["pulls"][0]["conflicts"]
    assert conflict["path"] == cw.DISPATCH
    assert "using Kernel = something_else;" in conflict["expected"]
    assert cw.GUARDED in conflict["found"]
    assert conflict["history"] == f"the text is that of {ARCHIVE}"
    shown = plan(cw.CONFLICT, more=())
    err = shown.out + shown.err
    assert f"{cw.DISPATCH}, hunk 1" in err
    assert "something_else" in err
    assert "enable_sm120_only" in err


# ----------------------------------------------------------------------- files come, go and move


def test_a_new_header(plan: Call) -> None:
    files = {row["path"]: row for row in compiled(plan(cw.NEW_HEADER))["stage"]["files"]}
    assert set(files) == {cw.DISPATCH, f"{cw.CUTLASS}/c3x/tile.cuh"}
    assert files[f"{cw.CUTLASS}/c3x/tile.cuh"]["before"] is None


def test_a_renamed_header(plan: Call) -> None:
    stage = compiled(plan(cw.RENAMED))["stage"]
    files = {row["path"]: (row["before"], row["after"]) for row in stage["files"]}
    assert files[cw.DISPATCH][1] is None
    assert files[f"{cw.CUTLASS}/c3x/scaled_mm_dispatch_sm120.cuh"][0] is None
    assert stage["units"][0]["path"] == cw.FP8


def test_a_deleted_header(plan: Call, spark_build: Call, built: list[Any]) -> None:
    stage = compiled(plan(cw.DELETED))["stage"]
    assert {row["path"]: row["after"] is None for row in stage["files"]} == {
        cw.DISPATCH: True,
        cw.FP8: False,
    }
    words = ("--engine", "oci", "-o", "oci:out", "--compile", "--no-verify")
    assert spark_build("image", *named(cw.DELETED), *BASE, *words).code == 0
    ((_, sources),) = built
    assert cw.DISPATCH not in sources


# ---------------------------------------------------------------------------- several in one plan


def test_a_series_is_compiled_once(
    plan: Call, spark_build: Call, built: list[Any], tmp_path: Path
) -> None:
    from builder.images.engines.oci import read_layout

    result = plan(cw.FAMILY, cw.UPPER)
    assert states(result) == {"pr-vllm-1": "needed", "pr-vllm-17": "needed"}
    lower, upper = (compiled(result, n) for n in (0, 1))
    assert (lower["with"], "stage" in lower) == ("pr-vllm-17", False)
    assert upper["stage"]["change"] == "pr-vllm-1-pr-vllm-17"
    assert [row["number"] for row in upper["stage"]["pulls"]] == [1, 17]
    assert plan(cw.UPPER, cw.FAMILY).code == 4
    words = ("--engine", "oci", "-o", "oci:out", "--compile", "--no-verify", "--json")
    made = spark_build("image", *named(cw.FAMILY, cw.UPPER), *BASE, *words)
    assert made.json["plan_digest"] == result.json["plan_digest"]
    ((_, sources),) = built
    assert b"enable_sm120_family<long>" in sources[cw.DISPATCH]
    baked, files, _ = read_layout(tmp_path / "work" / "out")
    receipts = f"{baked.document.base.site_packages}/.spark-build/receipts"
    carried = json.loads(files[f"{receipts}/pr-vllm-1.json"] or b"")
    assert (carried["compiled_with"], carried["files"]) == ("pr-vllm-17", {})
    assert f"{receipts}/pr-vllm-17.json" in files
    assert spark_build("verify", "oci:out", "--level", "static").code == 0
    assert spark_build("rebuild", "oci:out", "--json").json["same"] is True


def test_a_change_added_by_another_layer_is_not_in_the_base(
    spark_build: Call, cuda_world: cw.CudaWorld
) -> None:
    """The second finds its text, and it is the first one's: the release has it not."""
    head = cuda_world.pulls[cw.FAMILY].head
    words = (*named(cw.FAMILY), "--with-pr", f"vllm-project/vllm@{head}", *BASE, "--compile")
    result = spark_build("plan", *words, "--json")
    assert list(states(result).values()) == ["needed", "needed"]
    assert compiled(result, 0)["with"] == f"commit-vllm-{head[:12]}"


def test_part_of_a_series_is_not_reverted_alone(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path
) -> None:
    site = write_tree(tmp_path / "site-packages", installed(cuda_world))
    before = snapshot(site)
    assert spark_build("apply", site, *named(cw.FAMILY, cw.UPPER), "--compile").code == 0
    for name in ("pr-vllm-1", "pr-vllm-17"):
        result = spark_build("revert", site, "-l", name)
        assert (result.code, "are compiled into one extension wheel" in result.err) == (4, True)
    words = ("--level", "static", "--prove-necessary", "--json")
    result = spark_build("verify", f"dir:{site}", *named(cw.FAMILY, cw.UPPER), *words)
    rows = result.json["necessity"]
    assert [row["necessary"] for row in rows] == ["unknown", "unknown"]
    assert all("the same extension wheel as another change" in row["reason"] for row in rows)
    assert spark_build("revert", site).code == 0
    assert {k: v for k, v in snapshot(site).items() if v} == {k: v for k, v in before.items() if v}


def test_a_change_compiled_earlier_is_not_added_twice(
    spark_build: Call, plan: Call, built: list[Any]
) -> None:
    words = ("--engine", "oci", "--compile", "--no-verify")
    assert spark_build("image", *named(cw.FAMILY), *BASE, *words, "-o", "oci:a").code == 0
    result = plan(cw.FAMILY, cw.UPPER)
    assert compiled(result, 0) == {
        "sources": compiled(result, 0)["sources"],
        "with": "pr-vllm-17",
        "wheel": None,
    }
    assert len(built) == 1


def test_together_with_a_built_in_change(spark_build: Call, built: list[Any]) -> None:
    words = ("-l", "sm120-family", *named(cw.TILE), *BASE, "--compile")
    result = spark_build("plan", *words, "--json")
    assert list(states(result).items()) == [("pr-vllm-2", "needed"), ("sm120-family", "needed")]
    lower, upper = (compiled(result, n) for n in (0, 1))
    assert (lower["with"], "stage" in lower) == ("sm120-family", False)
    assert upper["stage"]["change"] == "pr-vllm-2-sm120-family"
    assert upper["code"]["how"] == "not-loadable"
    made = spark_build("image", *words, "--engine", "oci", "-o", "oci:out", "--no-verify")
    assert made.code == 0
    ((request, sources),) = built
    text = sources[cw.DISPATCH].decode()
    assert (cw.FAMILY_LINE in text, "a tile of 64" in text) == (True, True)
    assert request.files[0].after == sha256_hex(text.encode())
    result = spark_build("plan", "-l", "sm120-family", *named(cw.FAMILY), *BASE, "--compile")
    assert result.code == 0, "both are the same change"


def test_compiled_code_reveals_nothing_about_the_base(
    spark_build: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is the same before and after, whatever is read of the extension wheel."""
    runs = KernelCode("runs", "sm_120f", "enable_sm120_only")
    monkeypatch.setattr(machinecode, "read_module", lambda *_: runs)
    words = ("-l", "sm120-family", *named(cw.FAMILY), *BASE, "--compile", "--json")
    planned = spark_build("plan", *words)
    assert states(planned) == {"pr-vllm-1": "needed", "sm120-family": "not-applicable"}
    made = spark_build("image", *words, "--engine", "oci", "-o", "oci:out", "--no-verify")
    assert made.json["plan_digest"] == planned.json["plan_digest"]


def test_an_extension_wheel_from_elsewhere_is_not_overridden(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path
) -> None:
    about = json.dumps({"operators": [{"name": "_C::cutlass_scaled_mm"}]})
    other = {"spark_build_companion_patch/companion.json": about}
    files = installed(cuda_world) | dist_files("spark-build-companion-patch", "0.19.1+a", other)
    site = write_tree(tmp_path / "site-packages", files)
    words = ("plan", *named(cw.FAMILY), "-b", f"dir:{site}", "--compile", "--json")
    result = spark_build(*words)
    assert (states(result), result.code) == ({"pr-vllm-1": "ambiguous"}, 4)
    assert "spark_build_companion_patch in the base registers" in result.json["error"]["message"]


def test_an_environment_gets_another_on_top_and_goes_back(
    spark_build: Call, cuda_world: cw.CudaWorld, tmp_path: Path, built: list[Any]
) -> None:
    site = write_tree(tmp_path / "site-packages", installed(cuda_world))
    before = snapshot(site)
    assert spark_build("apply", site, *named(cw.FAMILY)).code == 10
    assert spark_build("apply", site, *named(cw.FAMILY), "--compile", "--dry-run").code == 0
    assert snapshot(site) == before
    assert spark_build("apply", site, *named(cw.FAMILY), "--compile").code == 0
    first = snapshot(site)
    one, both = (site / f"spark_build_companion_pr_vllm_{n}" for n in ("1", "1_pr_vllm_17"))
    assert one.is_dir()
    result = spark_build("apply", site, *named(cw.FAMILY, cw.UPPER), "--compile", "--json")
    assert states(result) == {"pr-vllm-1": "applied", "pr-vllm-17": "needed"}
    assert (one.exists(), both.is_dir()) == (False, True)
    assert len(built) == 2
    assert spark_build("revert", site, *("-l", "pr-vllm-1")).code == 4
    assert spark_build("revert", site, "-l", "pr-vllm-17").code == 0
    assert {k: v and v[2] for k, v in snapshot(site).items()} == {
        k: v and v[2] for k, v in first.items()
    }
    assert spark_build("revert", site).code == 0
    assert {k: v for k, v in snapshot(site).items() if v} == {k: v for k, v in before.items() if v}


# ------------------------------------------------------------------------------ other repositories


class _Pin:
    request, repository, number, commit, sha256 = "o/r#1", "o/r", 1, "a" * 40, "b" * 64


def rendered(repository: str, diff: bytes) -> list[dict[str, Any]]:
    pin: Any = _Pin()
    pin.repository, pin.request = repository, f"{repository}#1"
    return ops_of(pin, parts_of(pin, read_sections(diff), Pull(pull=pin.request)))


NEW = b"diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n"


def of(*paths: bytes) -> bytes:
    return b"".join(NEW % (path, path, path) for path in paths)


def test_only_vllm_has_a_stage() -> None:
    (op,) = rendered("vllm-project/vllm", of(b"csrc/x.cu"))
    assert (op["source"], op["arch"], op["name"]) == ("vllm", "12.1a", "pr-vllm-1")
    text, late = rendered("flashinfer-ai/flashinfer", of(b"csrc/x.cu"))
    assert (text["op"], late["op"], "source" in late) == ("diff", "compile", False)
    (op,) = rendered("flashinfer-ai/flashinfer", of(b"3rdparty/x.cu"))
    assert (op["op"], "source" in op) == ("compile", False)


def test_a_submodule_has_none() -> None:
    entry = b"diff --git a/csrc/cutlass b/csrc/cutlass\nnew file mode 160000\nindex 0..1\n"
    (op,) = rendered("vllm-project/vllm", entry)
    assert "source" not in op
    assert op["reason"].endswith("csrc/cutlass is a submodule")
