"""``--compile`` on ``plan``, ``image`` and ``apply``; the compiler itself is replaced."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.machinecode import KernelCode
from builder.applier.states import Target
from builder.common import machinecode
from builder.common.document import plain, read
from builder.common.plan import PlannedLayer, StageRequest
from builder.compile import stage
from builder.compile.executor import ContainerExecutor, ImageCompilers, ToolkitChoice
from builder.errors import BuildFailed, EngineError
from builder.images.engines.containers import Containers
from builder.images.engines.tasks import PinnedImage
from tests.unit.applier.test_compile_op import (
    BASE,
    MODULE,
    NOT_LOADED,
    PACKAGE,
    REQUEST,
    TEXT,
    WHEEL,
)
from tests.unit.caller import Call
from tests.unit.fakes import every_base_is, fake_base, no_sandbox, snapshot, vllm_files, write_tree

if TYPE_CHECKING:
    from pathlib import Path


REF = "pypi:vllm==0.20.1"
WORDS = ("-l", "mine", "-b", REF)
KERNELS = f"{PACKAGE}/kernels.so"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run one command."""
    return Call(capsys)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer, a base in memory whose kernels do not load, room enough, an empty directory."""
    write_tree(tmp_path / "patches", {"mine/layer.toml": TEXT.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(machinecode, "read_module", lambda *_: NOT_LOADED)
    made = fake_base(BASE)
    every_base_is(monkeypatch, made)
    no_sandbox(monkeypatch)
    here = Target("linux/arm64", "cp312")
    monkeypatch.setattr(Target, "here", lambda: here)
    room(monkeypatch, 64.0, 100.0, tmp_path)


def room(monkeypatch: pytest.MonkeyPatch, memory: float, disk: float, path: Path) -> None:
    monkeypatch.setattr(stage, "free_here", lambda: (memory, disk, path))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[StageRequest]:
    """The requests that were compiled: each gives a tiny wheel."""
    from builder.compile import stage

    ran: list[StageRequest] = []

    def opened(choice: ToolkitChoice, _platform: str) -> ContainerExecutor:
        found = REQUEST["toolkit"]
        image = PinnedImage(
            ref=found["image"], digest=found["digest"], platform=REQUEST["platform"]
        )
        toolkit = ImageCompilers(nvcc="nvcc", cuda="13.0", versions={}, library_headers=True)
        where = choice.containers
        return ContainerExecutor(containers=where, image=image, toolkit=toolkit, libraries=tmp_path)

    def build(request: StageRequest, *_: object) -> Path:
        ran.append(request)
        wheel = stage._folder(request) / WHEEL.filename
        wheel.parent.mkdir(parents=True, exist_ok=True)
        wheel.write_bytes(WHEEL.data)
        return wheel

    decided = SimpleNamespace(plan=SimpleNamespace(module="vllm/_C"), sources={}, refusal=None)
    monkeypatch.setattr(stage.Stages, "_decide", lambda *_: decided)
    monkeypatch.setattr(stage.Stages, "_request", lambda *_: read(REQUEST, StageRequest))
    monkeypatch.setattr(ToolkitChoice, "open", opened)
    monkeypatch.setattr(stage, "build", build)
    return ran


Built = list[StageRequest]


# ------------------------------------------------------------------------------------- exit codes


def test_10_without_a_compile_stage(call: Call, built: Built) -> None:
    for command in ("plan", "image"):
        ended = call(command, *WORDS)
        assert ended.code == 10, ended.err
        assert "image --layers mine --base docker://vllm/vllm-openai:v0.20.1 --compile" in ended.err
    ended = call("plan", *WORDS, "--platform", "linux/amd64")
    assert f"image --layers mine --base {REF} --platform linux/amd64 --compile" in ended.err
    assert built == []


def test_0_a_plan_with_a_compile_stage(call: Call, built: Built) -> None:
    plan = call("plan", *WORDS, "--compile", "--json")
    assert (plan.code, plan.json["layers"][0]["state"]) == (0, "needed")
    assert plan.json["layers"][0]["compile"]["stage"] == REQUEST
    assert built == []


def test_0_a_dry_run_prints_the_cost(call: Call, built: Built, tmp_path: Path) -> None:
    ended = call("image", *WORDS, "--compile", "--dry-run")
    assert ended.code == 0
    said = " ".join(ended.err.split())
    assert "of vllm-0.20.1.tar.gz, with nvcc 13.0.88: 1 unit, 1 at once: about 3 min" in said
    assert "10 GB of memory, 2.0 GB of disk csrc/scaled_mm_sm120_fp8.cu" in said
    assert built == []
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(("memory", "disk"), [(6.0, 100.0), (64.0, 0.2)])
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_6_a_machine_that_is_too_small(
    call: Call,
    built: Built,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memory: float,
    disk: float,
    more: list[str],
) -> None:
    room(monkeypatch, memory, disk, tmp_path)
    ended = call("image", *WORDS, "--compile", *more)
    assert ended.code == 6
    assert "compiling takes" in ended.err
    assert built == []
    assert list((tmp_path / "work").iterdir()) == []


def test_6_a_machine_of_another_architecture(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = Target("linux/amd64", "cp312")
    monkeypatch.setattr(Target, "here", lambda: other)
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = call("image", *WORDS, "--compile")
    assert ended.code == 6
    assert "the base is for linux/arm64 and this machine is linux/amd64" in ended.err
    assert "apt-get install g++-aarch64-linux-gnu" in ended.err
    assert "run the same command on a linux/arm64 machine, such as the Spark itself" in ended.err


def test_0_a_toolkit_image_compiles_for_another_architecture(
    call: Call, built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing of this machine is asked: not its architecture, compiler, memory or disk."""
    toolkit = {"image": "cuda:13", "digest": "sha256:" + "ab" * 32}
    monkeypatch.setitem(REQUEST, "toolkit", toolkit)
    monkeypatch.setattr(Containers, "elsewhere", True)
    other = Target("linux/amd64", "cp312")
    monkeypatch.setattr(Target, "here", lambda: other)
    room(monkeypatch, 0.1, 0.1, tmp_path)
    words = (*WORDS, "--compile", "--toolkit", "cuda:13", "--builder", "spark")
    planned = call("plan", *words)
    assert planned.code == 0
    said = " ".join(planned.out.split())
    assert "with nvcc 13.0.88 of cuda:13 (sha256:abababababab): 1 unit, 1 at once" in said
    printed = call("image", *words, "--engine", "oci", "--print-dockerfile")
    assert printed.out.startswith("# sm120-family: csrc/scaled_mm_sm120_fp8.cu; folders of")
    assert f"FROM cuda:13@{toolkit['digest']} AS unit0" in printed.out
    assert "COPY --from=" in printed.out.partition("FROM scratch")[2]
    assert built == []
    ended = call("image", *words, "--engine", "oci", "-o", "oci:out", "--no-verify")
    assert (ended.code, ended.err) == (0, ended.err)
    assert [plain(request)["toolkit"] for request in built] == [toolkit]


def test_a_rebuild_uses_the_toolkit_image_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from builder.pipeline.rebuild import _toolkit

    toolkit = {"image": "cuda:13", "digest": "sha256:" + "ab" * 32}
    compiled = {"wheel": None, "stage": {**REQUEST, "toolkit": toolkit}}
    row: dict[str, Any] = {
        "state": "needed",
        "reason": "r",
        "variant": None,
        "digest": "0" * 64,
        "files": [],
    }
    named = [{"name": "a", **row}, {"name": "b", **row, "compile": compiled}]
    layers = read(named, list[PlannedLayer])
    monkeypatch.setenv("SPARK_BUILD_BUILDER", "spark")
    choice = _toolkit(layers)
    assert choice is not None
    assert (choice.image, choice.containers.builder) == (f"cuda:13@{toolkit['digest']}", "spark")
    assert _toolkit(layers[:1]) is None


def test_6_no_compiler(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> Any:
        raise EngineError("no nvcc on PATH", hint="install the CUDA toolkit 13")

    monkeypatch.setattr(stage, "find_compiler", none)
    ended = call("plan", *WORDS, "--compile")
    assert (ended.code, "no nvcc on PATH" in ended.err) == (6, True)


def test_0_no_compiler_is_needed_if_the_base_has_the_change(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = KernelCode("runs", "sm_120f", "enable_sm120_family")
    monkeypatch.setattr(machinecode, "read_module", lambda *_: runs)
    monkeypatch.setenv("PATH", "/nonexistent")
    ended = call("plan", *WORDS, "--compile", "--json")
    assert (ended.code, ended.json["layers"][0]["state"]) == (0, "upstream")


def test_6_no_host_compiler(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = call("plan", *WORDS, "--compile")
    assert (ended.code, "g++ is not on PATH" in ended.err) == (6, True)


def test_7_the_compiler_fails(
    call: Call, built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(*_: object) -> Path:
        raise BuildFailed("the compiler refused a unit")

    monkeypatch.setattr(stage, "build", refuses)
    ended = call("image", *WORDS, "--compile")
    assert (ended.code, "the compiler refused a unit" in ended.err) == (7, True)
    assert list((tmp_path / "work").iterdir()) == []
    assert built == []


def test_2_not_for_several_platforms(call: Call) -> None:
    ended = call("image", "-l", "mine", "-b", "oci:x", "--all-platforms", "--compile")
    assert ended.code == 2
    assert "try: spark-build image -l mine -b oci:x --compile\n" in ended.err


# ----------------------------------------------------------------------------------------- an image


def test_an_image_contains_the_compiled_wheel(call: Call, built: Built, tmp_path: Path) -> None:
    from builder.images.engines.oci import read_layout

    planned = call("plan", *WORDS, "--compile", "--json").json
    ended = call("image", *WORDS, "--compile", "--engine", "oci", "-o", "oci:out", "--json")
    assert (ended.code, ended.err) == (0, ended.err)
    assert ended.json["plan_digest"] == planned["plan_digest"]
    assert "compile" in ended.json["timings"]
    static = [c for c in ended.json["verify"]["checks"] if c["level"] == "static"]
    not_run = [c["name"] for c in static if c["status"] != "pass"]
    assert not_run == ["startup hooks"], "the base of these files is not read"
    assert len(static) > 5
    recorded, files, _ = read_layout(tmp_path / "work" / "out")
    (layer,) = recorded.document.layers
    wheel = layer.compile and layer.compile.wheel
    assert wheel
    assert wheel.filename == WHEEL.filename
    assert KERNELS in {file.path for file in layer.files}
    assert files[f"{recorded.document.base.site_packages}/{KERNELS}"] == b"code"
    assert len(built) == 1
    call("image", *WORDS, "--compile", "--engine", "oci", "-o", "oci:again", "--no-verify")
    assert len(built) == 1, "what was compiled is kept"
    once, again = (tmp_path / "work" / name / "index.json" for name in ("out", "again"))
    digests = [json.loads(f.read_bytes())["manifests"][0]["digest"] for f in (once, again)]
    assert digests[0] == digests[1]


def test_a_damaged_wheel_in_the_cache_is_made_again(
    call: Call, built: Built, tmp_path: Path
) -> None:
    words = ("image", *WORDS, "--compile", "--engine", "oci", "--no-verify")
    assert call(*words, "-o", "oci:a").code == 0
    (kept,) = (tmp_path / "cache" / "companions").glob("*/*.whl")
    kept.write_bytes(b"cut short")
    assert call(*words, "-o", "oci:b").code == 0
    assert len(built) == 2
    assert kept.read_bytes() == WHEEL.data


def test_print_dockerfile_compiles_nothing(call: Call, built: Built) -> None:
    ended = call("image", *WORDS, "--compile", "--engine", "oci", "--print-dockerfile")
    assert (ended.code, built) == (0, [])
    assert "COPY --from=" in ended.out


# ----------------------------------------------------------------------------------- an environment


def test_apply_and_revert(
    call: Call, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from builder.applier.trees import DirTree
    from builder.images.subject import Subject
    from tests.unit.fakes import identity_of

    root = write_tree(tmp_path / "site", vllm_files() | {MODULE: b"an extension"})
    before = snapshot(root)
    tree = DirTree(root)
    base = Subject(identity_of(tree, "dir", site_packages=str(root)), tree)
    every_base_is(monkeypatch, base)
    refused = call("apply", root, "-l", "mine")
    assert refused.code == 10
    assert f"spark-build apply {root} --layers mine --compile" in refused.err
    assert snapshot(root) == before
    assert call("apply", root, "-l", "mine", "--compile", "--dry-run").code == 0
    assert (snapshot(root), built) == (before, [])
    assert call("apply", root, "-l", "mine", "--compile").code == 0
    assert (root / KERNELS).read_bytes() == b"code"
    assert len(built) == 1
    again = call("apply", root, "-l", "mine", "--json")  # no compiler is asked for any more
    assert again.json["layers"][0]["state"] == "applied"
    assert call("revert", root).code == 0
    assert {k: v for k, v in snapshot(root).items() if v} == {k: v for k, v in before.items() if v}


@pytest.mark.parametrize("member", ["compiler", "headers"])
def test_a_rebuild_compiles_with_the_same_kind_of_compiler(
    call: Call, built: Built, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    """One out of wheels is taken out of wheels again, also where another is installed."""
    from builder.compile.stage import Stages
    from builder.pipeline import rebuild as command

    pin = {**REQUEST["inputs"][0], "member": member}
    monkeypatch.setitem(REQUEST, "inputs", [*REQUEST["inputs"], pin])
    made = call("image", *WORDS, "--compile", "--engine", "oci", "-o", "oci:out", "--no-verify")
    assert (made.code, len(built)) == (0, 1)
    said = "of vllm-0.20.1.tar.gz, with nvcc 13.0.88 of released wheels"
    assert (said in " ".join(made.err.split())) == (member == "compiler")
    named: list[str | None] = []

    def stages_of(index: Any, nvcc: str | None, toolkit: ToolkitChoice | None) -> Stages:
        named.append(nvcc)
        return Stages(index, nvcc=nvcc, toolkit=toolkit)

    monkeypatch.setattr(command, "stages_of", stages_of)
    again = call("rebuild", "oci:out")
    assert (again.code, again.out.startswith("same sha256:")) == (0, True), again.err
    assert named == ["wheels" if member == "compiler" else None]
