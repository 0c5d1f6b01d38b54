"""``--forge-clone``: the same pull requests out of a git clone, without a network."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.common.forge import Clone, ForgeMissing, Forges, PullStore, parse_pull
from builder.errors import RemoteError, UsageError
from tests.forge import Repository
from tests.processes import pullworld as pw

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.forge import LocalForge
    from tests.processes.pullworld import World
    from tests.unit.conftest import Called

    Call = Callable[..., Called]

NAME = "vllm-project/vllm"


@pytest.fixture(scope="module")
def mirror(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare clone with the heads of pull requests where a forge's mirror has them."""
    folder = tmp_path_factory.mktemp("clones") / "vllm.git"
    subprocess.run(["git", "clone", "-q", "--bare", world.repository.folder, folder], check=True)
    for number, pull in world.pulls.items():
        git(folder, "update-ref", f"refs/pull/{number}/head", pull.head)
    git(folder, "remote", "set-url", "origin", f"https://git.example.org/{NAME}.git")
    return folder


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


@pytest.fixture
def clone(mirror: Path) -> Clone:
    return Clone(mirror)


@pytest.fixture
def no_forge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the forge that is set."""
    monkeypatch.setenv("SPARK_BUILD_FORGE", "http://127.0.0.1:9")


KINDS = {
    "open": (pw.OPEN, "unknown"),
    "by-squash": (pw.MERGED_BY_SQUASH, "merged"),
    "by-merge": (pw.MERGED_BY_MERGE, "merged"),
    "upper-of-a-stack": (pw.UPPER, "unknown"),
    "shapes": (pw.SHAPES, "unknown"),
}


@pytest.mark.parametrize(("number", "state"), KINDS.values(), ids=KINDS.keys())
def test_its_facts_come_from_the_history(
    clone: Clone, world: World, number: int, state: str
) -> None:
    facts = clone.facts(parse_pull(f"{NAME}#{number}"))
    pull = world.pulls[number]
    assert (facts.commit, facts.state, facts.merge_commit) == (pull.head, state, pull.merge_commit)


@pytest.mark.parametrize("number", [pw.OPEN, pw.MERGED_BY_SQUASH, pw.MERGED_BY_MERGE, pw.LINE_ENDS])
def test_it_gives_the_same_diff_as_the_forge(mirror: Path, forge: LocalForge, number: int) -> None:
    """To the byte, in normal form: a lock made with one holds with the other."""
    ref = parse_pull(f"{NAME}#{number}")
    ours, theirs = (PullStore(Forges(clones)).resolve(ref) for clones in ([str(mirror)], []))
    assert (ours.sha256, ours.base, ours.commit) == (theirs.sha256, theirs.base, theirs.commit)


def test_releases_are_tags_that_contain_the_commit(clone: Clone, world: World) -> None:
    merged = world.pulls[pw.MERGED_BY_SQUASH].merge_commit
    assert clone.releases_with(NAME, merged) == ("1.2.0", "1.3.0")
    assert clone.releases_with(NAME, world.pulls[pw.OPEN].head) == ()


def test_a_commit_is_read_from_it(clone: Clone, world: World) -> None:
    merged = world.pulls[pw.MERGED_BY_SQUASH].merge_commit
    facts = clone.facts(parse_pull(f"{NAME}@{merged[:9]}"))
    assert (facts.commit, facts.target) == (merged, world.repository.git("rev-parse", f"{merged}^"))


def test_a_missing_pull_request_error_has_the_fetch_command(clone: Clone, mirror: Path) -> None:
    with pytest.raises(ForgeMissing) as caught:
        clone.facts(parse_pull(f"{NAME}#99"))
    assert f"git -C {mirror} fetch origin pull/99/head" in caught.value.hint


def test_two_heads_of_one_number_are_an_error(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", world.repository.folder, folder], check=True)
    git(folder, "update-ref", "refs/remotes/origin/pr/1", world.pulls[1].head)
    git(folder, "update-ref", "refs/pull/1/head", world.pulls[2].head)
    with pytest.raises(RemoteError, match="2 different heads"):
        Clone(folder).facts(parse_pull(f"{NAME}#1"))


def test_a_folder_that_is_not_a_clone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a git clone"):
        Clone(tmp_path)


def test_an_option_is_not_a_commit(clone: Clone) -> None:
    with pytest.raises(ForgeMissing):
        clone.diff(NAME, "--output=/tmp/x", "HEAD")


def test_the_checked_out_branch_is_not_the_release_branch(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", world.repository.folder, folder], check=True)
    git(folder, "checkout", "-q", "-B", "mine", world.pulls[pw.OPEN].head)
    git(folder, "remote", "set-head", "origin", "--delete")
    git(folder, "update-ref", f"refs/pull/{pw.OPEN}/head", world.pulls[pw.OPEN].head)
    assert Clone(folder).facts(parse_pull(f"{NAME}#{pw.OPEN}")).state == "unknown"


class TestChoice:
    def test_a_clone_is_used_for_its_own_repository(
        self, mirror: Path, forge: LocalForge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARK_BUILD_FORGE_CLONE", str(mirror))
        assert isinstance(Forges().for_repository("VLLM-Project/vllm")[0], Clone)
        assert not isinstance(Forges().for_repository("other/vllm")[0], Clone)

    def test_a_prefix_names_the_repository(self, mirror: Path) -> None:
        forges = Forges([f"my/fork={mirror}"])
        assert isinstance(forges.for_repository("my/fork")[0], Clone)
        assert not isinstance(forges.for_repository(NAME)[0], Clone)

    def test_a_clone_without_a_remote_is_used_for_all(self, world: World) -> None:
        forges = Forges([str(world.repository.folder)])
        assert isinstance(forges.for_repository("any/thing")[0], Clone)


@pytest.mark.usefixtures("wheels", "no_forge")
class TestPlan:
    def test_needs_no_forge(self, spark_build: Call, mirror: Path) -> None:
        words = ["plan", "--with-pr", f"{NAME}#1", "-b", "pypi:vllm==1.0.0", "--json"]
        assert spark_build(*words).code == 8
        result = spark_build(*words, "--forge-clone", mirror)
        assert [layer["state"] for layer in result.json["layers"]] == ["needed"]

    @pytest.mark.parametrize(
        ("base", "state"),
        [("1.0.0", "needs-rebuild"), ("1.2.0", "upstream"), ("1.3.0", "upstream")],
    )
    def test_ancestry_decides_where_no_wheel_can(
        self, spark_build: Call, tmp_path: Path, base: str, state: str
    ) -> None:
        """A change of CUDA sources alone: only the history says which release has it."""
        repository = Repository(tmp_path / "clone")
        repository.commit("start", {"vllm/__init__.py": ""})
        repository.git("tag", "v1.0.0")
        repository.branch("pr", "v1.0.0")
        head = repository.commit("CUDA", {"csrc/new.cu": "// new\n"})
        repository.git("update-ref", "refs/pull/30/head", head)
        repository.merge("pr", "Merge pull request #30")
        repository.git("tag", "v1.2.0")
        words = ["--with-pr", f"{NAME}#30", "-b", f"pypi:vllm=={base}", "--json"]
        result = spark_build("plan", *words, "--forge-clone", repository.folder)
        assert [layer["state"] for layer in result.json["layers"]] == [state]
        assert result.json["pulls"][0]["release"] == "1.2.0"
