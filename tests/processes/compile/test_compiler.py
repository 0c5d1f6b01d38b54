"""Which compiler is taken: installed, or out of wheels of a package index on the loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from builder.applier.states import Target
from builder.common.plan import Input
from builder.common.pypi import PackageIndex
from builder.compile import executor
from builder.compile.host import NATIVE, TARGETS, of_wheels, where_to_compile
from builder.compile.toolchain import RELEASE, find_compiler
from builder.errors import EngineError, RemoteError, UsageError
from tests.unit.fakes import fake_base, vllm_files
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = Target.here().platform
#: The other platform, and what compiles for it.
OTHER, CROSS, PACKAGE = (
    ("linux/arm64", "aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    if HERE == "linux/amd64"
    else ("linux/amd64", "x86_64-linux-gnu-g++", "g++-x86-64-linux-gnu")
)
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release {}, V{}'\n"
GPP = b"#!/bin/sh\necho 'g++ (Debian 12.2.0-14) 12.2.0'\n"
VERSIONS = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-cuda-cccl": "13.0.85",
    "nvidia-cuda-runtime": "13.0.96",
}
FILES = {
    "nvidia-cuda-nvcc": {
        "bin/nvcc": NVCC.format("13.0", "13.0.88").encode(),
        "bin/nvcc.profile": b"TOP = $(_HERE_)/..\n",
        "bin/cudafe++": b"",
        "bin/fatbinary": b"",
        "bin/ptxas": b"",
        "include/fatbinary_section.h": b"",
    },
    "nvidia-nvvm": {"nvvm/bin/cicc": b"", "nvvm/libdevice/libdevice.10.bc": b"", "lib/x.so": b""},
    "nvidia-cuda-crt": {"include/crt/host_config.h": b""},
    "nvidia-cuda-cccl": {"include/cccl/cuda/std/version": b""},
    "nvidia-cuda-runtime": {
        "include/cuda_runtime.h": b"",
        "lib/libcudart.so.13": b"runtime",
        "lib/libcudart_static.a": b"",
    },
}


def publish(index: FakeIndex, *, without: str = "", lacking: str = "") -> None:
    """The wheels of a toolkit, without one of them, or with a file missing."""
    for project, files in FILES.items():
        if project != without:
            held = {f"nvidia/cu13/{k}": v for k, v in files.items() if k != lacking}
            index.add(project, VERSIONS[project], held)
            index.add(project, "13.0.99", {})  # newer ones are not of that release
    index.add("cuda-toolkit", RELEASE, {}, [f"{k}=={v}.*" for k, v in VERSIONS.items()])


def program(folder: Path, name: str, text: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text)
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a g++ and no nvcc."""
    folder = program(tmp_path / "tools", "g++", GPP).parent
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(executor, "_USUAL", tmp_path / "none")
    return folder


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with FakeIndex() as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@pytest.mark.usefixtures("tools")
def test_without_an_nvcc_the_released_one_is_used(index: FakeIndex) -> None:
    publish(index)
    found = find_compiler(PackageIndex(), HERE)
    assert (found.cuda, found.versions) == ("13.0", {"nvcc": "13.0.88", "host": "12.2.0"})
    assert {pin.distribution: pin.version for pin in found.pins} == VERSIONS
    assert all(pin.sha256 == index.sha256(pin.filename) for pin in found.pins)
    assert not found.nvcc.exists(), "a plan fetches no compiler"
    found.ready(PackageIndex())
    root = found.nvcc.parent.parent
    assert found.nvcc.stat().st_mode & 0o111
    assert (root / "nvvm/bin/cicc").stat().st_mode & 0o111
    target = root / "targets" / TARGETS[HERE]
    assert (target / "include/crt/host_config.h").is_file()
    assert (target / "lib/libcudart.so").read_bytes() == b"runtime"
    assert not list(root.rglob("x.so")), "what no compiler needs"
    asked = len(index.requests)
    again = find_compiler(PackageIndex(), HERE)
    again.ready(PackageIndex())
    assert again == found
    assert len(index.requests) == asked, "it is there, and nothing is asked for again"


def test_an_installed_nvcc_is_preferred(index: FakeIndex, tools: Path) -> None:
    publish(index)
    program(tools, "nvcc", NVCC.format("12.9", "12.9.86").encode())
    found = find_compiler(PackageIndex(), HERE)
    assert (found.nvcc, found.cuda, found.pins) == (tools / "nvcc", "12.9", ())
    assert index.requests == []
    assert find_compiler(PackageIndex(), HERE, "wheels").versions["nvcc"] == "13.0.88"


def test_the_setting_selects_the_nvcc(
    index: FakeIndex, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index)
    program(tools, "nvcc", NVCC.format("12.9", "12.9.86").encode())
    monkeypatch.setenv("SPARK_BUILD_NVCC", "wheels")
    assert find_compiler(PackageIndex(), HERE).cuda == "13.0"
    other = program(tmp_path / "other", "nvcc", NVCC.format("13.1", "13.1.80").encode())
    monkeypatch.setenv("SPARK_BUILD_NVCC", str(other))
    assert find_compiler(PackageIndex(), HERE).cuda == "13.1"
    nearer = find_compiler(PackageIndex(), HERE, "wheels")
    assert nearer.cuda == "13.0", "the command line comes first"
    with pytest.raises(EngineError, match="no nvcc at /nonexistent"):
        find_compiler(PackageIndex(), HERE, "/nonexistent")


@pytest.mark.usefixtures("index", "tools")
def test_6_an_index_without_the_wheels() -> None:
    with pytest.raises(
        EngineError, match=r"no nvcc for .* on PATH .* 'cuda-toolkit' is not on"
    ) as caught:
        find_compiler(PackageIndex(), HERE)
    assert caught.value.code == 6
    assert "--nvcc" in caught.value.hint


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("part", FILES)
def test_6_an_index_without_one_of_them(index: FakeIndex, part: str) -> None:
    publish(index, without=part)
    with pytest.raises(EngineError, match=f"'{part}' is not on the package index"):
        find_compiler(PackageIndex(), HERE)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    "name",
    [name for files in FILES.values() for name in files if name != "lib/x.so"],
)
def test_6_a_wheel_that_lacks_a_file(index: FakeIndex, name: str) -> None:
    publish(index, lacking=name)
    found = find_compiler(PackageIndex(), HERE)
    with pytest.raises(EngineError, match=f"13.0.88 lack .*{name}".replace("+", r"\+")):
        found.ready(PackageIndex())
    assert not found.nvcc.parent.parent.exists(), "nothing half-made is left"


@pytest.mark.usefixtures("tools")
def test_8_a_wheel_with_a_wrong_sha256(index: FakeIndex) -> None:
    publish(index)
    found = find_compiler(PackageIndex(), HERE)
    name = next(pin.filename for pin in found.pins if "nvvm" in pin.filename)
    index.faults.swap[name] = index.files[name][:-1] + b"x"
    with pytest.raises(RemoteError, match=r"sha256 is .*, pinned is"):
        found.ready(PackageIndex())
    assert not found.nvcc.exists()


@pytest.mark.usefixtures("tools")
def test_6_a_compiler_that_does_not_run_here(index: FakeIndex) -> None:
    publish(index)
    files = {f"nvidia/cu13/{k}": v for k, v in FILES["nvidia-cuda-nvcc"].items()}
    index.add("nvidia-cuda-nvcc", "13.0.88", {**files, "nvidia/cu13/bin/nvcc": b"\x7fELF"})
    with pytest.raises(EngineError, match="nvcc does not run here"):
        find_compiler(PackageIndex(), HERE).ready(PackageIndex())


def test_6_no_host_compiler(index: FakeIndex, tools: Path) -> None:
    publish(index)
    (tools / "g++").unlink()
    for named in (None, "wheels"):
        with pytest.raises(EngineError, match=r"g\+\+ is not on PATH") as caught:
            find_compiler(PackageIndex(), HERE, named)
        assert "apt-get install g++" in caught.value.hint


# ---------------------------------------------------------------------------- another architecture


@pytest.mark.usefixtures("tools")
def test_6_no_compiler_for_another_architecture(index: FakeIndex) -> None:
    publish(index)
    with pytest.raises(EngineError, match=f"base is for {OTHER} and this machine is {HERE}") as got:
        find_compiler(PackageIndex(), OTHER)
    assert (
        f"apt-get install {PACKAGE}, or run the same command on a {OTHER} machine" in got.value.hint
    )
    assert f"on any {OTHER} machine" in where_to_compile(OTHER).replace("the Spark itself, or ", "")
    assert f"apt-get install {PACKAGE}" in where_to_compile(OTHER)
    assert index.requests == []


@pytest.mark.parametrize("installed", [False, True])
def test_the_wheels_serve_another_architecture(
    index: FakeIndex, tools: Path, *, installed: bool
) -> None:
    """An installed toolkit has the headers and the runtime of its own architecture alone."""
    publish(index)
    program(tools, CROSS, GPP)
    if installed:
        program(tools, "nvcc", NVCC.format("13.0", "13.0.88").encode())
    assert where_to_compile(OTHER) == ""
    found = find_compiler(PackageIndex(), OTHER)
    assert found.host.words == ("-ccbin", CROSS, "-target-dir", TARGETS[OTHER])
    assert found.versions == {"nvcc": "13.0.88", "host": f"{CROSS} 12.2.0"}
    found.ready(PackageIndex())
    targets = found.nvcc.parent.parent / "targets"
    assert [path.name for path in targets.iterdir()] == [TARGETS[OTHER]]
    own = find_compiler(PackageIndex(), HERE, "wheels")
    assert (own.host, own.host.words) == (NATIVE, ())
    assert own.nvcc != found.nvcc, "each has a folder of its own"
    if installed:
        with pytest.raises(EngineError, match=f"cannot compile for {OTHER}") as caught:
            find_compiler(PackageIndex(), OTHER, str(tools / "nvcc"))
        assert "--nvcc wheels" in caught.value.hint


def test_an_installed_toolkit_for_both_is_preferred(
    index: FakeIndex, tools: Path, tmp_path: Path
) -> None:
    program(tools, CROSS, GPP)
    runtime = tmp_path / "cuda" / "targets" / TARGETS[OTHER] / "lib"
    runtime.mkdir(parents=True)
    (runtime / "libcudart.so").touch()
    asks = f"[ \"$*\" = '-ccbin {CROSS} -target-dir {TARGETS[OTHER]} --dryrun -shared x.o' ] &&"
    said = f"{asks} echo '#$ LIBRARIES= \"-L{runtime}\"' >&2\n"
    program(tools, "nvcc", (NVCC.format("13.1", "13.1.80") + said).encode())
    found = find_compiler(PackageIndex(), OTHER)
    assert (found.nvcc, found.cuda, found.pins) == (tools / "nvcc", "13.1", ())
    assert found.host.command == CROSS
    assert index.requests == []


def test_a_stage_names_its_compiler() -> None:
    pin = Input(distribution="a", version="1", filename="a.whl", sha256="0" * 64)
    rows = [structs.replace(pin, member=name) for name in ("headers", "sources to compile")]
    assert not of_wheels([pin, *rows])
    assert of_wheels([*rows, structs.replace(pin, member="compiler")])


def test_the_cache_lists_the_compiler(index: FakeIndex, tools: Path) -> None:
    from builder.common.cache import KINDS

    publish(index)
    del tools
    kind = next(kind for kind in KINDS if kind.name == "toolkits")
    folder = find_compiler(PackageIndex(), HERE).nvcc.parent.parent
    assert folder.parent.name in kind.folders
    assert kind.entry
    assert kind.entry.fullmatch(folder.name)


def test_a_base_of_another_platform_than_was_asked_for_is_refused() -> None:
    from builder.compile.command import _must_be_for

    base = fake_base(vllm_files())
    is_for = base.identity.platform.oci
    other = next(name for name in TARGETS if name != is_for)
    with pytest.raises(UsageError, match=f"is for {is_for}, but .* for {other}") as caught:
        _must_be_for(base, other, PackageIndex())
    assert caught.value.hint == f"--platform {is_for}"
