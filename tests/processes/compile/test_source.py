"""The source of a base: a release's archive, or the commit that its version names."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any, cast

import pytest

from builder.__main__ import run
from builder.common.forge import Forges
from builder.common.paths import cache_dir
from builder.compile.sources import source_of
from builder.errors import RemoteError, UsageError
from builder.publishing.evidence import purl
from tests.forge import Fault, LocalForge, Repository

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.common.pypi import PackageIndex

NAME = "vllm-project/vllm"
FILES = {
    "CMakeLists.txt": "project(vllm)\n",
    "csrc/gemm.cu": "__global__ void gemm() {}\n",
    "vllm/__init__.py": "",
}
#: No release is asked for where a commit is named.
NO_INDEX = cast("PackageIndex", None)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "vllm")
    made.commit("Start", FILES)
    made.commit("A faster GEMM", {"csrc/gemm.cu": "__global__ void gemm(int) {}\n"})
    return made


@pytest.fixture
def forge(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalForge]:
    with LocalForge(repository, NAME) as server:
        monkeypatch.setenv("SPARK_BUILD_FORGE", server.root)
        yield server


def head(repository: Repository) -> str:
    return repository.git("rev-parse", "main")


def test_the_commit_of_a_version_is_fetched_once(forge: LocalForge) -> None:
    """Its files decide the digest, not how they were packed; a local build's mark is no matter."""
    commit = head(forge.repository)
    tree = source_of(NO_INDEX, f"0.19.2rc1.dev3+g{commit[:9]}.cu130")
    assert tree.version == "0.19.2rc1.dev3"
    assert tree.origin == f"git+https://127.0.0.1/{NAME}@{commit}"
    assert (tree.root / "csrc" / "gemm.cu").read_text() == "__global__ void gemm(int) {}\n"
    assert not (tree.root / "vllm").exists()
    asked = len(forge.requests)
    assert source_of(NO_INDEX, f"0.19.2rc1.dev3+g{commit[:7]}") == tree
    assert len(forge.requests) == asked


def test_a_repacked_archive_is_the_same_source(
    forge: LocalForge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = f"0.19.2.dev3+g{head(forge.repository)[:9]}"
    digests = []
    for name in ("one", "another"):
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / name))
        digests.append(source_of(NO_INDEX, version).sha256)
    assert sum("/tarball/" in path for path in forge.paths) == 2
    assert digests[0] == digests[1]
    before = forge.repository.git("rev-parse", "main^")
    assert source_of(NO_INDEX, f"0.19.2.dev2+g{before[:9]}").sha256 != digests[0]


def test_a_clone_can_be_the_source(
    forge: LocalForge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = f"0.19.2.dev3+g{head(forge.repository)[:9]}"
    fetched = source_of(NO_INDEX, version)
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "other"))
    asked = len(forge.requests)
    cloned = source_of(NO_INDEX, version, Forges([f"{NAME}={forge.repository.folder}"]))
    assert (cloned.sha256, cloned.origin) == (fetched.sha256, fetched.origin)
    assert len(forge.requests) == asked


def test_an_unknown_commit(forge: LocalForge) -> None:
    with pytest.raises(RemoteError, match="0123abcd"):
        source_of(NO_INDEX, "0.19.2.dev3+g0123abcd")
    assert not list((cache_dir() / "sources").glob("*"))


def test_a_response_that_is_not_an_archive(forge: LocalForge) -> None:
    forge.faults.append(Fault("/tarball/", 200, body=b"<html>"))
    with pytest.raises(RemoteError, match="is not an archive"):
        source_of(NO_INDEX, f"0.19.2.dev3+g{head(forge.repository)[:9]}")
    assert not list((cache_dir() / "sources").glob("*"))


def test_a_commit_of_another_project(forge: LocalForge) -> None:
    forge.repository.commit("Not vLLM", {"CMakeLists.txt": None})
    with pytest.raises(UsageError, match=r"has no CMakeLists\.txt"):
        source_of(NO_INDEX, f"0.19.2.dev4+g{head(forge.repository)[:9]}")
    assert not list((cache_dir() / "sources").glob("*"))


def test_a_version_without_a_commit_is_refused() -> None:
    with pytest.raises(UsageError, match="names no commit") as caught:
        source_of(NO_INDEX, "0.19.2.dev3+local")
    assert "0.19.2.dev3+gCOMMIT" in caught.value.hint


def test_an_invalid_version_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", "show", "--vllm", "newest"]) == 2
    assert "'newest' is not a vLLM version" in capsys.readouterr().err


def test_a_release_is_fetched_from_the_index() -> None:
    """A wheel of a release that somebody built has the release's sources."""
    asked: list[tuple[str, str]] = []

    class Index:
        def sdist(self, project: str, version: str) -> Any:
            asked.append((project, version))
            raise UsageError("asked")

    for version in ("0.19.1", "0.19.1+cu130", "0.19.1+g0123abcd"):
        with pytest.raises(UsageError, match="asked"):
            source_of(cast("PackageIndex", Index()), version)
    assert asked == [("vllm", "0.19.1")] * 3


def test_the_package_url_names_the_repository() -> None:
    origin = f"git+https://github.com/{NAME}@{'0' * 40}"
    assert purl("vllm", "0.19.2.dev3", origin).startswith(
        "pkg:pypi/vllm@0.19.2.dev3?vcs_url=git%2Bhttps%3A%2F%2Fgithub.com"
    )


def test_the_clone_is_read_with_git(repository: Repository) -> None:
    """What it gives is what git itself would archive."""
    forge, _ = Forges([f"{NAME}={repository.folder}"]).for_repository(NAME)
    command = ["git", "-C", str(repository.folder), "archive", "--prefix=source/", "main"]
    expected = subprocess.run(command, check=True, capture_output=True).stdout
    assert forge.archive(NAME, forge.commit(NAME, "main")) == expected
