"""A small project with a history, releases and pull requests of every kind that matters here."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.forge import LocalForge, Pull, Repository

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.wheels.fakeindex import FakeIndex

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


def module(**bodies: str) -> str:
    """A module with one function for each name; ``bodies`` replace what some of them return."""
    parts = [
        f"def {name}(value):\n    first_of_{name} = value + {at}\n    kept = first_of_{name} * 2\n"
        f"    return {bodies.get(name, 'kept')}\n"
        for at, name in enumerate(NAMES)
    ]
    return '"""Kernels."""\n\n\n' + "\n\n".join(parts)


ENVS = "environment_variables = {}\n"
CRLF = "".join(f"line_{n} = {n}\r\n" for n in range(12))
NO_END = "".join(f"item_{n} = {n}\n" for n in range(8)) + "last = 8"
TEST = "def test_alpha():\n    assert True\n"
GPU = "".join(f"__device__ int f{n}() {{ return {n}; }}\n" for n in range(12))
LEGACY = "".join(f"legacy_{n} = {n}\n" for n in range(6))

START: dict[str, str | bytes] = {
    "vllm/__init__.py": "",
    "vllm/envs.py": ENVS,
    "vllm/kernels.py": module(),
    "vllm/layers.py": module(beta="kept - 1"),
    "vllm/crlf.py": CRLF.encode(),
    "vllm/no_end.py": NO_END,
    "vllm/legacy.py": LEGACY,
    "vllm/old_name.py": module(alpha="'old'"),
    "vllm/moved.py": module(gamma="'moved'"),
    "vllm/run.sh": "#!/bin/sh\necho run\n",
    "vllm/logo.png": b"\x89PNG\x00\x01\x02",
    "csrc/gemm.cu": GPU,
    "CMakeLists.txt": "project(vllm)\n",
    "tests/test_kernels.py": TEST,
    "tests/data.bin": b"\x00\x01\x02\x03",
    "docs/guide.md": "# Guide\n",
    "requirements/cuda.txt": "torch\n",
}


@dataclass
class World:
    """The repository, its pull requests by number, and tag -> version of its releases."""

    repository: Repository
    pulls: dict[int, Pull] = field(default_factory=dict)
    versions: tuple[str, ...] = ()
    _releases: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def forge(self) -> LocalForge:
        """A forge of its own for one test."""
        forge = LocalForge(self.repository)
        forge.pulls = copy.deepcopy(self.pulls)
        return forge

    def release(self, version: str) -> dict[str, bytes]:
        """The installed files of a release."""
        if version not in self._releases:  # a process of git for each file
            self._releases[version] = self.repository.files(f"v{version}", "vllm")
        return dict(self._releases[version])

    def publish(self, index: FakeIndex) -> None:
        """Put every release on an index."""
        for version in self.versions:
            index.add("vllm", version, self.release(version))


OPEN, MERGED_BY_SQUASH, MERGED_BY_MERGE, SUPERSEDED, GPU_ONLY, GPU_AND_PYTHON = 1, 2, 3, 4, 5, 6
BINARY_INSIDE, BINARY_OUTSIDE, SHAPES, LINE_ENDS, LOWER, UPPER = 7, 8, 9, 10, 11, 12
CONFLICTING, HUGE, EMPTY, TESTS_ONLY, SUBMODULE, INTO_PACKAGE = 13, 14, 15, 16, 17, 18
REVERTED, UNRELATED = 19, 20


class _Maker:
    def __init__(self, folder: Path) -> None:
        self.world = World(Repository(folder))
        self.repository = self.world.repository

    def pull(
        self,
        number: int,
        title: str,
        changes: Mapping[str, str | bytes | None],
        *,
        start: str = "v1.0.0",
        modes: Mapping[str, int] | None = None,
    ) -> Pull:
        """A branch with one commit, and the pull request of it."""
        self.repository.branch(f"pr-{number}", start)
        head = self.repository.commit(title, changes, modes=modes)
        self.world.pulls[number] = Pull(head=head, title=title)
        return self.world.pulls[number]

    def release(self, version: str) -> None:
        self.repository.git("checkout", "-q", "-f", "main")
        self.repository.git("tag", f"v{version}")
        self.world.versions = (*self.world.versions, version)

    def main(self, message: str, changes: Mapping[str, str | bytes | None]) -> str:
        self.repository.git("checkout", "-q", "-f", "main")
        return self.repository.commit(message, changes)


def make_world(folder: Path) -> World:
    """Make the history; the same every time."""
    maker = _Maker(folder)
    repository = maker.repository
    repository.commit("start", START)
    maker.release("1.0.0")
    _open_pulls(maker)
    by_squash = maker.pull(
        MERGED_BY_SQUASH,
        "Return the first of gamma",
        {
            "vllm/kernels.py": module(gamma="first_of_gamma_as_it_was"),
            "vllm/gamma_helper.py": "def help_gamma(value):\n    return value * 31 + 17\n",
            "tests/test_kernels.py": TEST + "\n\ndef test_gamma():\n    assert True\n",
        },
    )
    by_merge = maker.pull(
        MERGED_BY_MERGE,
        "Layers: another theta",
        {"vllm/layers.py": module(beta="kept - 1", theta="kept + 88888888")},
    )
    reverted = maker.pull(
        REVERTED,
        "A flag that did not last",
        {"vllm/envs.py": ENVS + "EXPERIMENTAL_FLAG_OF_EPSILON = 1\n"},
    )
    maker.main("unrelated", {"docs/guide.md": "# Guide\n\nMore.\n"})
    maker.release("1.1.0")
    by_squash.merge_commit = repository.squash(
        f"pr-{MERGED_BY_SQUASH}", f"Return the first of gamma (#{MERGED_BY_SQUASH})"
    )
    by_merge.merge_commit = repository.merge(f"pr-{MERGED_BY_MERGE}", "Merge pull request #3")
    reverted.merge_commit = repository.squash(f"pr-{REVERTED}", f"A flag (#{REVERTED})")
    maker.release("1.2.0")
    edited = module(gamma="first_of_gamma_as_it_was or value").replace(
        "kept = first_of_gamma * 2", "kept = first_of_gamma << 1"
    )
    maker.main(
        "go on with gamma, and take the flag back",
        {"vllm/kernels.py": edited, "vllm/envs.py": ENVS},
    )
    maker.release("1.3.0")
    return maker.world


def _open_pulls(maker: _Maker) -> None:
    maker.pull(
        OPEN,
        "Faster alpha",
        {
            "vllm/kernels.py": module(alpha="kept + 1"),
            "tests/test_kernels.py": TEST + "\n\ndef test_faster():\n    assert True\n",
            "docs/guide.md": "# Guide\n\nFaster.\n",
            "requirements/cuda.txt": "torch\nnumpy\n",
        },
    )
    superseded = maker.pull(SUPERSEDED, "Gamma, first try", {"vllm/kernels.py": module(gamma="1")})
    superseded.state = "closed"
    superseded.comments = ["Looks good.", "Closing in favor of #2, which is simpler."]
    gpu = GPU.replace("return 3", "return 33")
    maker.pull(GPU_ONLY, "CUDA only", {"csrc/gemm.cu": gpu, "CMakeLists.txt": "project(vllm 2)\n"})
    maker.pull(
        GPU_AND_PYTHON,
        "CUDA and Python",
        {"csrc/gemm.cu": gpu, "vllm/kernels.py": module(zeta="3")},
    )
    maker.pull(
        BINARY_INSIDE,
        "A new logo",
        {"vllm/logo.png": b"\x89PNG\x00\x09", "vllm/envs.py": ENVS + "A = 1\n"},
    )
    maker.pull(
        BINARY_OUTSIDE,
        "New data",
        {"tests/data.bin": b"\x00\x09", "vllm/kernels.py": module(eta="7")},
    )
    edited = module(gamma="'moved and edited'")
    maker.pull(
        SHAPES,
        "Files come, go, move and change their mode",
        {
            "vllm/new/__init__.py": "",
            "vllm/new/thing.py": "THING = 1\n",
            "vllm/legacy.py": None,
            "vllm/old_name.py": None,
            "vllm/new_name.py": module(alpha="'old'"),
            "vllm/moved.py": None,
            "vllm/sub/moved.py": edited,
        },
        modes={"vllm/run.sh": 0o755},
    )
    maker.pull(
        LINE_ENDS,
        "Odd line ends",
        {
            "vllm/crlf.py": CRLF.replace("line_5 = 5", "line_5 = 55").encode(),
            "vllm/no_end.py": NO_END.replace("last = 8", "last = 9"),
        },
    )
    maker.pull(LOWER, "Delta in two steps: first", {"vllm/kernels.py": module(delta="kept + 4")})
    maker.pull(
        UPPER,
        "Delta in two steps: second",
        {"vllm/kernels.py": module(delta="kept + 44")},
        start=f"pr-{LOWER}",
    )
    maker.world.pulls[UPPER].base = f"pr-{LOWER}"
    maker.pull(CONFLICTING, "Another delta", {"vllm/kernels.py": module(delta="value - 1")})
    rows = "".join(f'    "{n}": "value number {n:08}",\n' for n in range(150_000))
    maker.pull(HUGE, "A table", {"vllm/table.json": f"{{\n{rows}}}\n"})
    maker.pull(EMPTY, "Nothing", {})
    maker.pull(TESTS_ONLY, "More tests", {"tests/test_more.py": TEST, "docs/guide.md": "# Tests\n"})
    _submodule(maker)
    maker.pull(
        INTO_PACKAGE,
        "An example becomes part of it",
        {"tests/test_kernels.py": None, "vllm/test_kernels.py": TEST + "# more\n"},
    )
    maker.pull(UNRELATED, "Theta", {"vllm/layers.py": module(beta="kept - 1", eta="5")})


def _submodule(maker: _Maker) -> None:
    repository = maker.repository
    repository.branch(f"pr-{SUBMODULE}", "v1.0.0")
    commit = repository.git("rev-parse", "v1.0.0")
    entry = f"160000,{commit},csrc/cutlass"
    repository.git("update-index", "--add", "--cacheinfo", entry)
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{commit},third_party/other")
    repository.git("commit", "-q", "-m", "Submodules")
    head = repository.git("rev-parse", "HEAD")
    maker.world.pulls[SUBMODULE] = Pull(head=head, title="Submodules")
