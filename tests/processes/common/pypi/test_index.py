"""A package index that lies: what it serves never gets further than it should."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common import pypi
from builder.common.paths import cache_dir
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.errors import UsageError
from builder.proof.trust import TrustedSources
from tests.unit.fakes import layer_text, vllm_files, write_tree
from tests.wheels.fakeindex import FakeIndex, build_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.conftest import Called

    Call = Callable[..., Called]

JSON = "application/vnd.pypi.simple.v1+json"
NAME = "vllm-1.0.0-py3-none-any.whl"
BASE = ("-b", "pypi:vllm==1.0.0")
PLAN = ("plan", "-l", "fix", *BASE)
KERNELS = "vllm/kernels.py"
FILES = {p: d for p, d in vllm_files().items() if p.startswith("vllm/")}
FILES[KERNELS] = b"ORDER = ['cutlass']\n"
OP = f'op = "replace"\nfile = "{KERNELS}"\nold = "cutlass"\nnew = "b12x"\n'
#: As long as the honest one, so that the page's size is right.
EVIL = {**FILES, KERNELS: b"ORDER = ['cutlass']#"}


@pytest.fixture
def index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark_build: Call
) -> Iterator[FakeIndex]:
    """An honest index with a vLLM, and a layer that patches it."""
    write_tree(tmp_path / "patches", {"fix/layer.toml": layer_text(OP, when=">=1.0.0").encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    with FakeIndex() as running:
        running.add("vllm", "1.0.0", FILES)
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@pytest.fixture
def liar(index: FakeIndex) -> Iterator[FakeIndex]:
    """An index that serves other bytes under the honest wheel's name and sha256."""
    evil = build_wheel("vllm", "1.0.0", EVIL)
    assert len(evil) == len(index.files[NAME])
    with FakeIndex() as running:
        running.files = dict(index.files)
        running.faults.swap[NAME] = evil
        yield running


def use(index: FakeIndex, monkeypatch: pytest.MonkeyPatch, cache: Path | None = None) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    if cache:
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(cache))


def page(index: FakeIndex, **changes: Any) -> tuple[str, bytes]:
    """The page of vLLM in JSON, with some values changed."""
    row = {"filename": NAME, "url": f"{index.root}/files/{NAME}", "size": len(index.files[NAME]),
           "hashes": {"sha256": index.sha256(NAME)}} | changes  # fmt: skip
    return JSON, json.dumps({"meta": {"api-version": "1.1"}, "files": [row]}).encode()


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("form", ["json", "html"])
@pytest.mark.parametrize("sha256", ["../../../out/x", "{}/out"])
def test_a_hash_is_not_a_path(
    index: FakeIndex, spark_build: Call, tmp_path: Path, sha256: str, form: str
) -> None:
    sha256 = sha256.format(tmp_path)
    index.faults.page["vllm"] = page(index, hashes={"sha256": sha256})
    if form == "html":
        link = f"<a href='{index.root}/files/{NAME}#sha256={sha256}'>{NAME}</a>"
        index.faults.page["vllm"] = "text/html", link.encode()
    before = files_below(tmp_path)
    result = spark_build(*PLAN)
    assert result.code == 8, result.err
    assert "is not a sha256" in result.err
    assert sha256[:20] in result.err
    assert files_below(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_a_file_name_is_not_a_path(index: FakeIndex, spark_build: Call, tmp_path: Path) -> None:
    index.faults.page["vllm"] = page(index, filename="vllm-1.0.0-py3-none-../../any.whl")
    assert spark_build(*PLAN).code == 2
    assert not list(tmp_path.rglob("any.whl"))


def test_a_cached_page_is_checked_again(index: FakeIndex, spark_build: Call) -> None:
    """One that an older spark-build has written is not used: it checked nothing."""
    assert spark_build(*PLAN).code == 0
    (kept,) = (cache_dir() / "index").glob("vllm*.json")
    old = json.loads(kept.read_bytes())
    for changes in ({"sha256": "../x"}, {"yanked": False}, {"filename": "../x.whl"}):
        kept.write_text(json.dumps([{**row, **changes} for row in old]))
        assert [w.filename for w in PackageIndex().wheels("vllm")] == [NAME], changes


# ------------------------------------------------------------------------- other bytes under a hash


def test_what_one_index_served_is_not_used_for_another(
    index: FakeIndex, liar: FakeIndex, spark_build: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(liar, monkeypatch)
    assert spark_build(*PLAN).code == 0
    use(index, monkeypatch)
    assert PackageIndex().wheels("vllm")[0].sha256 == index.sha256(NAME)
    wheel = RemoteWheel(PackageIndex().wheels("vllm")[0], PackageIndex())
    assert wheel.read(KERNELS) == FILES[KERNELS]
    assert spark_build("image", "-l", "fix", *BASE, "-o", "oci:out", "--no-verify").code == 0
    blobs = b"".join(_unpacked(path) for path in Path("out").rglob("*") if path.is_file())
    assert b"ORDER = ['b12x']\n" in blobs
    assert b"b12x']#" not in blobs


def _unpacked(path: Path) -> bytes:
    import zlib

    data = path.read_bytes()
    return zlib.decompressobj(wbits=47).decompress(data) if data[:2] == b"\x1f\x8b" else data


def test_a_cache_of_an_older_version_is_not_used(
    index: FakeIndex, liar: FakeIndex, spark_build: Call
) -> None:
    """It has files of every index under the wheel's hash."""
    old = cache_dir() / "wheels" / index.sha256(NAME)
    evil = RemoteWheel(PackageIndex(liar.url).wheels("vllm")[0], PackageIndex(liar.url))
    evil.read(KERNELS)
    ranges = next((cache_dir() / "ranges").iterdir())
    old.mkdir(parents=True)
    (ranges / "members.json").rename(old / "members.json")
    (ranges / "files").rename(old / "files")
    wheel = RemoteWheel(PackageIndex().wheels("vllm")[0], PackageIndex())
    assert wheel.read(KERNELS) == FILES[KERNELS]


@pytest.mark.parametrize("command", ["plan", "image"])
def test_a_lock_refuses_other_bytes(
    index: FakeIndex,
    liar: FakeIndex,
    spark_build: Call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    """From an empty cache, with the hashes that are locked."""
    assert spark_build("lock", "-l", "fix", *BASE).code == 0
    use(liar, monkeypatch, tmp_path / "empty")
    words = (command, "-l", "fix", *BASE)
    for more in (("--locked",), ()):
        result = spark_build(*words, *more, *(("-o", "oci:out") if command == "image" else ()))
        assert result.code == 8, result.err
        assert "the sha256 of its RECORD is" in result.err
        assert not Path("out").exists()
    use(index, monkeypatch, tmp_path / "other")
    assert spark_build(*words, "--locked", *(("-o", "oci:out") if command == "image" else ())).code in (0, 5)  # fmt: skip  # noqa: E501


def test_a_lock_refuses_a_file_that_is_left_out(
    index: FakeIndex,
    liar: FakeIndex,
    spark_build: Call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert spark_build("lock", "-l", "fix", *BASE).code == 0
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(index.files[NAME])) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            if info.filename != KERNELS:
                new.writestr(info, old.read(info))
        new.comment = bytes(len(index.files[NAME]) - out.tell() - 500)
    short = len(index.files[NAME]) - len(out.getvalue())
    out.seek(0)
    with zipfile.ZipFile(out, "a") as new:
        new.comment += bytes(short)
    liar.faults.swap[NAME] = out.getvalue()
    use(liar, monkeypatch, tmp_path / "empty")
    result = spark_build(*PLAN, "--locked")
    assert result.code == 8, result.err
    assert f"has no '{KERNELS}', which its RECORD lists" in result.err


def test_a_lock_from_before_pins_no_contents(
    index: FakeIndex, spark_build: Call, tmp_path: Path
) -> None:
    """It says so, and `lock` adds them."""
    assert spark_build("lock", "-l", "fix", *BASE).code == 0
    path = Path("spark-build.lock")
    value = json.loads(path.read_bytes())
    (entry,) = value["locked"].values()
    record = entry["base"]["wheels"][0].pop("record")
    path.write_text(json.dumps(value))
    result = spark_build(*PLAN, "--locked")
    assert result.code == 9
    assert f"{NAME}: its RECORD has sha256 {record[:12]}, which is not locked yet" in result.err
    assert spark_build("lock", "--check").code == 9
    assert spark_build(*PLAN).code == 0
    assert spark_build("lock").code == 0
    assert spark_build("lock", "--check").code == 0
    assert spark_build(*PLAN, "--locked").code == 0


def test_by_range_and_whole_must_be_the_same(index: FakeIndex, liar: FakeIndex) -> None:
    """A liar that serves the whole wheel honestly is found out when it is downloaded."""
    found = PackageIndex(liar.url)
    wheel = RemoteWheel(found.wheels("vllm")[0], found)
    assert wheel.read(KERNELS) == EVIL[KERNELS]
    liar.faults.swap.clear()
    with pytest.raises(Exception, match="by range, the package index served other contents"):
        wheel.download()
    again = RemoteWheel(found.wheels("vllm")[0], found)
    assert again.read(KERNELS) == FILES[KERNELS]
    assert again.is_known


def test_a_whole_wheel_is_listed_once(index: FakeIndex, liar: FakeIndex) -> None:
    """What is listed of it is from the whole wheel, not from ranges, and read again if damaged."""
    lies = PackageIndex(liar.url)
    lied = RemoteWheel(lies.wheels("vllm")[0], lies)
    assert lied.read(KERNELS) == EVIL[KERNELS]
    honest = PackageIndex(index.url)
    file = honest.wheels("vllm")[0]
    archive = RemoteWheel(file, honest).download()
    first = RemoteWheel(file, honest)
    assert first.metadata()["Name"] == "vllm"
    assert first.members != lied.members
    archive.write_bytes(b"never opened again")
    again = RemoteWheel(file, honest)
    assert again.members == first.members
    assert again.metadata()["Version"] == "1.0.0"
    archive.with_name("contents.json").write_bytes(b"[")
    with pytest.raises(Exception, match="is not a wheel"):
        assert RemoteWheel(file, honest).members


def test_only_what_was_hashed_is_known(index: FakeIndex, liar: FakeIndex) -> None:
    """By range nothing is, unless RECORD is pinned; whole it is."""
    import dataclasses

    from builder.common.wheels import WheelTree

    found = PackageIndex(liar.url)
    file = found.wheels("vllm")[0]
    for pinned in ("", RemoteWheel(file, found).record):
        wheel = RemoteWheel(dataclasses.replace(file, record=pinned), found)
        unknown = TrustedSources(index=found).unknown(WheelTree([wheel]), [KERNELS])
        assert unknown == ([] if pinned else [KERNELS])
    with pytest.raises(Exception, match="sha256 is"):
        RemoteWheel(file, found).download()
    honest = PackageIndex(index.url)
    wheel = RemoteWheel(honest.wheels("vllm")[0], honest)
    trust = TrustedSources(index=honest)
    assert trust.unknown(WheelTree([wheel]), [KERNELS]) == [KERNELS]
    assert trust.apart(WheelTree([wheel]), [KERNELS]) is None, "the whole wheel is hashed for it"
    assert trust.unknown(WheelTree([wheel]), [KERNELS]) == []


def test_a_patched_file_is_as_well_known_as_before(index: FakeIndex) -> None:
    """A plan of our own layers on bytes that nobody knows makes nothing known."""
    from builder.applier.trees import Content, OverlayTree
    from builder.common.wheels import WheelTree

    found = PackageIndex(index.url)
    wheel = RemoteWheel(found.wheels("vllm")[0], found)
    before = wheel.members[KERNELS].sha256
    after, new = Content.of(b"ORDER = ['b12x']\n"), Content.of(b"NEW = 1\n")
    tree = OverlayTree(WheelTree([wheel]))
    tree.update({KERNELS: after, "vllm/new.py": new})
    trust = TrustedSources(
        index=found, written={(KERNELS, after.sha256): before, ("vllm/new.py", new.sha256): None}
    )
    assert trust.unknown(tree, [KERNELS, "vllm/new.py"]) == [KERNELS]
    wheel.download()
    assert trust.unknown(tree, [KERNELS, "vllm/new.py"]) == []


# ------------------------------------------------------------------------------------------ bounds


def test_an_endless_page_is_not_read_to_its_end(
    index: FakeIndex, spark_build: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.faults.page["vllm"] = JSON, b" " * 100
    index.faults.endless.add("vllm")
    result = spark_build(*PLAN)
    assert result.code == 8
    assert "more than 16 MiB" in result.err
    assert pypi.PAGE_BYTES == 16 << 20


def test_an_endless_range_is_not_read_to_its_end(index: FakeIndex, spark_build: Call) -> None:
    index.faults.endless.add(NAME)
    result = spark_build(*PLAN)
    assert result.code == 8
    assert "answered 206 with more than" in result.err


def test_an_endless_wheel_is_not_read_to_its_end(index: FakeIndex) -> None:
    found = PackageIndex(index.url)
    wheel = RemoteWheel(found.wheels("vllm")[0], found)
    assert wheel.size
    index.faults.endless.add(NAME)
    assert wheel.download().read_bytes() == index.files[NAME]


def test_without_ranges_it_says_so(index: FakeIndex, spark_build: Call) -> None:
    index.faults.no_ranges = True
    result = spark_build(*PLAN)
    assert result.code == 8
    assert "answered 200" in result.err


# ------------------------------------------------------------------------------------------ yanked


def test_a_yanked_release_is_only_used_if_named(index: FakeIndex, spark_build: Call) -> None:
    index.add("vllm", "1.0.0", FILES, ["flashinfer-python>=1"])
    index.add("flashinfer-python", "1.0", {"flashinfer/a.py": b"1"})
    bad = index.add("flashinfer-python", "2.0", {"flashinfer/a.py": b"2"})
    index.faults.yanked[bad] = "wrong numbers"
    result = spark_build(*PLAN, "--json")
    assert result.json["base"]["packages"]["flashinfer-python"] == "1.0"
    assert "yanked" not in result.err
    named = f"{BASE[1]},flashinfer-python==2.0"
    result = spark_build("plan", "-l", "fix", "-b", named, "--json")
    assert result.json["base"]["packages"]["flashinfer-python"] == "2.0"
    assert result.err.count(f"{bad} was yanked from the package index: wrong numbers") == 1


def test_a_page_of_a_later_day_is_asked_for_again(
    index: FakeIndex, spark_build: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was ahead, and was set back, does not keep a page for years."""
    assert spark_build(*PLAN).code == 0
    asked = len(index.requests)
    assert spark_build(*PLAN).code == 0
    assert len(index.requests) == asked
    year = time.time() + 365 * 86_400
    for page in (cache_dir() / "index").iterdir():
        os.utime(page, (year, year))
    assert spark_build(*PLAN).code == 0
    assert len(index.requests) > asked


# ------------------------------------------------------------------------------------ odd metadata


def odd(index: FakeIndex, wheel: bytes) -> None:
    index.files[NAME] = wheel


@pytest.mark.parametrize(
    ("name", "version", "requires", "why"),
    [
        ("torch", "1.0.0", (), "has the metadata of another: torch-1.0.0.dist-info"),
        ("vllm", "2.0.0", (), "has the metadata of another: vllm-2.0.0.dist-info"),
        ("vllm", "1.0.0", ("flashinfer-python ==", ), "malformed requirement"),
        ("vllm", "1.0.0", ("; ", ), "malformed requirement"),
        ("vllm", "1.0.0", ("flashinfer-python; python_version > 'x' and y == '1'",), "malformed"),
        ("vllm", "1.0.0", (f"flashinfer-python[{'a,' * 9999}]", ), "characters"),
        ("vllm", "1.0.0", ("flashinfer-python; " + "(" * 4000, ), "malformed"),
        ("vllm", "1.0.0", ("flashinfer-python==1.0; extra == 'x' and extra ~= 'y'", ), ""),
    ],
    ids=range(8),
)  # fmt: skip
def test_odd_metadata_is_refused(
    index: FakeIndex,
    spark_build: Call,
    name: str,
    version: str,
    requires: tuple[str, ...],
    why: str,
) -> None:
    odd(index, build_wheel(name, version, FILES, requires))
    result = spark_build(*PLAN)
    assert result.code == 8, result.err
    assert why in result.err
    assert NAME in result.err


def test_a_full_disk_is_no_failure_of_the_wheel(
    index: FakeIndex, spark_build: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command would fail again."""

    def full(wheel: RemoteWheel) -> str:
        raise UsageError("cannot write members.json: No space left on device", hint="free space")

    monkeypatch.setattr(RemoteWheel, "metadata", full)
    result = spark_build(*PLAN)
    assert (result.code, result.err.splitlines()[-1].strip()) == (2, "try: free space")


def test_metadata_that_names_another_is_refused(index: FakeIndex, spark_build: Call) -> None:
    text = b"Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n"
    odd(index, build_wheel("vllm", "1.0.0", FILES, metadata=text))
    result = spark_build(*PLAN)
    assert result.code == 8
    assert "its METADATA is that of 'torch' '1.0.0'" in result.err


def test_a_package_may_require_itself(index: FakeIndex, spark_build: Call) -> None:
    index.add("vllm", "1.0.0", FILES, ["vllm[extra]==1.0.0", "vllm", "flashinfer-python[x]"])
    index.add(
        "flashinfer-python", "1.0", {}, ["vllm[extra,x]", "flashinfer-python[x,y]; extra=='x'"]
    )
    assert spark_build(*PLAN).code == 0


@pytest.mark.parametrize(
    ("requires", "why"),
    [
        ([f"vllm[x{number}]" for number in range(400)], "more than 100 sets of extras"),
        (["flashinfer-python"] * 501, "more than 500 requirements"),
    ],
    ids=["extras", "requirements"],
)
def test_requirements_have_a_limit(
    index: FakeIndex, spark_build: Call, requires: list[str], why: str
) -> None:
    """A package that requires itself with ever other extras never came to an end."""
    index.add("vllm", "1.0.0", FILES, requires)
    index.add("flashinfer-python", "1.0", {})
    result = spark_build(*PLAN)
    assert result.code == 8
    assert why in result.err


@pytest.mark.parametrize("name", ["/etc/x", "a/b", "", "-", "a" + "/" * 9, "é", "a\nb", "../x"])
def test_a_package_s_name_is_not_a_path(index: FakeIndex, tmp_path: Path, name: str) -> None:
    """The name of a pin comes with a layer, maybe out of an image."""
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match="is not the name of a package"):
        PackageIndex(index.url).wheels(name)
    assert files_below(tmp_path) == before
    assert not index.requests


def test_a_wheel_without_metadata_is_refused(index: FakeIndex, spark_build: Call) -> None:
    data = os.urandom(len(index.files[NAME]))
    for wheel in (data, b"", b"PK\x05\x06" + bytes(18)):
        odd(index, wheel)
        assert spark_build(*PLAN).code == 8


def test_https_is_never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    from builder.common.net import Session
    from builder.errors import RemoteError

    answer = requests.Response()
    answer.status_code, answer.url = 302, "https://index.example.invalid/simple/vllm/"
    with Session() as session:
        for target, good in (
            ("http://index.example.invalid/x", False), ("https://other.example.invalid/", True),
            ("/relative", True), ("//other.example.invalid/x", True), ("ftp://x/", False),
        ):  # fmt: skip
            answer.headers["Location"] = target
            if good:
                assert session.get_redirect_target(answer)
            else:
                with pytest.raises(RemoteError, match="redirects from https to"):
                    session.get_redirect_target(answer)
