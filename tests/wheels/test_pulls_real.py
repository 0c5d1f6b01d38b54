"""Pull requests on released vLLM: a git history made of the wheels' own files, and its forge.

What changed between two releases is what their pull requests were made of, so the changes here are
vLLM's own: new files, edits that later releases edited again, and code that moved on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import cache_dir
from builder.common.plan import Platform
from builder.common.wheels import RemoteWheel
from tests.forge import LocalForge, Pull, Repository

from .cli import Ran, called, spark_build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.common.pypi import PackageIndex

ORACLE = "vllm/model_executor/layers/fused_moe/oracle/nvfp4.py"
EXPERT = "vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py"
KERNEL = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
LINEAR = "vllm/model_executor/kernels/linear/__init__.py"
CONFIG = "vllm/config/kernel.py"
FILES = (ORACLE, EXPERT, KERNEL, LINEAR, CONFIG)
RELEASES = ("0.20.1", "0.21.0", "0.22.0", "0.22.1", "0.24.0", "0.28.0")

#: The expert and its entry in the oracle, merged between 0.21.0 and 0.22.0; the same as two open
#: ones that were never merged as such; an open one against 0.24.0; one with CUDA sources.
MERGED, LOWER, UPPER, REACHABLE, CUDA = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Real:
    """The history and its forge."""

    repository: Repository
    forge: LocalForge


@pytest.fixture(scope="module")
def real(index: PackageIndex, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """One commit for each release, and pull requests between them."""
    repository = Repository(tmp_path_factory.mktemp("real") / "vllm")
    forge = LocalForge(repository)
    beside: dict[str, bytes | str | None] = {
        "csrc/fp4.cu": "".join(f"// line {n}\n" for n in range(20)),
        "tests/test_moe.py": "def test(): ...\n",
    }
    for release in RELEASES:
        if release == "0.22.0":
            _merge(repository, forge, index)
        files: dict[str, bytes | str | None] = {**beside, **_files(index, release)}
        repository.git("checkout", "-q", "-f", "main") if repository.git("branch") else None
        repository.commit(f"vLLM {release}", files)
        repository.git("tag", f"v{release}")
    _open(repository, forge, index)
    with forge:
        yield Real(repository, forge)


def _files(index: PackageIndex, release: str) -> dict[str, bytes]:
    wheel = RemoteWheel(index.choose("vllm", release, Platform()), index)
    return {path: wheel.read(path) for path in FILES if path in wheel.members}


def _merge(repository: Repository, forge: LocalForge, index: PackageIndex) -> None:
    """The expert becomes part of main before 0.22.0."""
    new = _files(index, "0.22.0")
    repository.branch("expert", "v0.21.0")
    changes: dict[str, bytes | str | None] = {
        EXPERT: new[EXPERT],
        ORACLE: new[ORACLE],
        "tests/test_moe.py": "def test_b12x(): ...\n",
    }
    head = repository.commit("Add the b12x expert", changes)
    forge.pulls[MERGED] = Pull(head=head, title="Add the b12x expert")
    merged = repository.squash("expert", f"Add the b12x expert (#{MERGED})")
    forge.pulls[MERGED].merge_commit = merged


def _open(repository: Repository, forge: LocalForge, index: PackageIndex) -> None:
    lower, upper = _files(index, "0.22.1"), _files(index, "0.24.0")
    repository.branch("lower", "v0.21.0")
    head = repository.commit("Lower", {ORACLE: lower[ORACLE]})
    forge.pulls[LOWER] = Pull(head=head, title="The oracle, first step")
    repository.branch("upper", "lower")
    head = repository.commit("Upper", {ORACLE: upper[ORACLE]})
    forge.pulls[UPPER] = Pull(head=head, title="The oracle, second step", base="lower")
    repository.branch("reachable", "v0.24.0")
    old = b"        # --linear-backend flashinfer_b12x to opt in explicitly.\n"
    text = upper[LINEAR]
    assert text.count(old) == 1
    new = old + b"        FlashInferB12xNvFp4LinearKernel,\n"
    head = repository.commit("Reach b12x", {LINEAR: text.replace(old, new)})
    forge.pulls[REACHABLE] = Pull(head=head, title="Reach b12x")
    repository.branch("cuda", "v0.21.0")
    gpu = repository.read("v0.21.0", "csrc/fp4.cu").replace(b"line 9", b"line nine")
    head = repository.commit("CUDA too", {"csrc/fp4.cu": gpu, EXPERT: lower[EXPERT]})
    forge.pulls[CUDA] = Pull(head=head, title="CUDA too")


@pytest.fixture
def planned(real: Real, tmp_path: Path) -> Any:
    """Plan pull requests on a release."""

    def plan(*numbers: int, base: str, more: tuple[str, ...] = ()) -> Ran:
        pulls = [w for n in numbers for w in ("--with-pr", f"vllm-project/vllm#{n}")]
        words = ("plan", *pulls, "--base", f"pypi:vllm=={base}", "--json", *more)
        return called(*words, cwd=tmp_path, env=environment(real))

    return plan


def environment(real: Real) -> dict[str, str]:
    return {"SPARK_BUILD_FORGE": real.forge.root, "SPARK_BUILD_CACHE": str(cache_dir())}


def states(ran: Ran) -> list[str]:
    return [layer["state"] for layer in ran.json()["layers"]]


@pytest.mark.parametrize(
    ("base", "state"),
    [
        ("0.21.0", "needed"),
        ("0.22.1", "applied"),
        ("0.24.0", "upstream"),  # merged, and edited since
        ("0.33.0", "upstream"),
    ],
)
def test_a_merged_pull_request_on_releases_before_and_after(
    planned: Any, base: str, state: str
) -> None:
    ran = planned(MERGED, base=base)
    assert (ran.code, states(ran)) == (0, [state])
    (report,) = ran.json()["pulls"]
    assert (report["state"], report["release"]) == ("merged", "0.22.0")
    assert [row["path"] for row in report["dropped"]] == ["tests/test_moe.py"]


def test_the_graft_is_suggested_by_name(planned: Any) -> None:
    (report,) = planned(MERGED, base="0.21.0").json()["pulls"]
    assert "vllm 0.22.0 has it; graft" in report["hints"][0]
    assert "FlashInferB12xExperts" in report["hints"][0]


def test_an_unlabelled_merged_stack_is_found_from_its_last_part(planned: Any) -> None:
    """0.24.0 holds both steps, the first of them below the second."""
    assert states(planned(LOWER, UPPER, base="0.24.0")) == ["applied", "applied"]
    assert states(planned(LOWER, UPPER, base="0.22.1")) == ["applied", "needed"]
    assert states(planned(LOWER, UPPER, base="0.21.0")) == ["needed", "needed"]
    assert states(planned(LOWER, base="0.24.0")) == ["drift"]


def test_a_conflict_says_which_releases_it_fits(planned: Any) -> None:
    ran = planned(REACHABLE, base="0.22.1")
    assert (ran.code, states(ran)) == (4, ["drift"])
    (conflict,) = ran.json()["pulls"][0]["conflicts"]
    assert conflict["path"] == LINEAR
    assert conflict["history"].startswith("this hunk's text is in vllm 0.24.0 … 0.2")
    assert "… 0.23.0" in conflict["history"].partition("not in")[2]
    both = "        FlashInferCutlassNvFp4LinearKernel,"
    assert both in conflict["expected"]
    assert both in conflict["found"]


@pytest.mark.parametrize(("base", "state"), [("0.24.0", "needed"), ("0.28.0", "drift")])
def test_a_pull_request_is_applied_to_the_suggested_release(
    planned: Any, base: str, state: str
) -> None:
    assert states(planned(REACHABLE, base=base)) == [state]


def test_cuda_sources_need_a_rebuild_until_their_python_is_applied(planned: Any) -> None:
    ran = planned(CUDA, base="0.21.0")
    assert (ran.code, states(ran)) == (10, ["needs-rebuild"])
    ran = planned(CUDA, base="0.22.1")
    assert (ran.code, states(ran)) == (0, ["applied"])


def test_an_image_with_half_a_change_is_detected(real: Real, tmp_path: Path) -> None:
    """Every hunk fits, and yet vLLM needs more: the imports say so, before any hardware does."""
    words = ["--layers", "marlin", "--with-pr", f"vllm-project/vllm#{MERGED}"]
    words += ["--base", "pypi:vllm==0.21.0", "--engine", "oci", "--output", "oci:out"]
    env = environment(real)
    locked = spark_build("lock", *words[:6], cwd=tmp_path, env=env)
    assert locked.code == 0, locked.err
    real.forge.requests.clear()
    built = spark_build("image", *words, "--no-verify", "--locked", "--json", cwd=tmp_path, env=env)
    assert built.code == 0, built.err
    assert real.forge.requests == []
    assert (f"pr-vllm-{MERGED}", "needed") in [
        (layer["name"], layer["state"]) for layer in built.json()["layers"]
    ]
    verify = ("verify", "oci:out", "--locked", "--level")
    static = called(*verify, "static", cwd=tmp_path, env=env)
    assert static.code == 0, static.err
    imports = called(*verify, "imports", cwd=tmp_path, env=env)
    assert imports.code == 5
    assert "vllm.utils.flashinfer has no flashinfer_b12x_fused_moe" in imports.err


def test_a_clone_gives_the_same_result(real: Real, tmp_path: Path) -> None:
    for number, pull in real.forge.pulls.items():
        real.repository.git("update-ref", f"refs/pull/{number}/head", pull.head)
    real.repository.git("checkout", "-q", "-f", "main")
    clone = ("--forge-clone", str(real.repository.folder))
    env = {**environment(real), "SPARK_BUILD_FORGE": "http://127.0.0.1:9"}
    words = ("plan", "--with-pr", f"vllm-project/vllm#{MERGED}", "--json", *clone)
    ran = called(*words, "--base", "pypi:vllm==0.24.0", cwd=tmp_path, env=env)
    assert states(ran) == ["upstream"]
    assert ran.json()["pulls"][0]["release"] == "0.22.0"
