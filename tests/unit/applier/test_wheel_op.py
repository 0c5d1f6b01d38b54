"""``wheel`` and ``remove``: whole distributions, with RECORD kept true."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.applier.judging import judge, judge_in_order
from builder.applier.receipts import parse_record
from builder.applier.sources import wheel_members
from builder.applier.states import APPLIED, DRIFT, NEEDED, NOT_APPLICABLE, Target
from builder.applier.trees import Content, versions
from builder.applier.values import ApplyError, sha256_hex
from tests.unit.fakes import (
    TARGET,
    FakeSources,
    MemoryTree,
    Table,
    Wheel,
    altered,
    dist_files,
    judged,
    make_layer,
    make_wheel,
    replace_op,
    vllm_files,
)

if TYPE_CHECKING:
    from builder.applier.layers import Layer

OLD_FILES = {"lib/__init__.py": "v = 1\n", "lib/old.py": "", "lib/same.py": "s = 0\n"}
NEW = make_wheel(
    "lib",
    "2.0",
    {
        "lib/__init__.py": "v = 2\n",
        "lib/same.py": "s = 0\n",
        "lib/new.py": "",
        "lib/tool.sh": "#!/bin/sh\n",
        "lib-2.0.data/purelib/lib/pure.py": "p = 1\n",
        "lib-2.0.data/scripts/lib-cli": "#!python\n",
    },
    executable=["lib/tool.sh"],
)


def wheel_layer(*wheels: Wheel, **op: object) -> Layer:
    wheel = wheels[-1]
    rendered: Table = {"op": "wheel", "distribution": wheel.name, "version": wheel.version}
    if "version-of" in op:
        del rendered["version"]
    return make_layer("lib", {**rendered, **op}, wheels=wheels)


def base(**extra: bytes) -> MemoryTree:
    return MemoryTree(vllm_files() | dist_files("lib", "1.0", OLD_FILES) | extra)


def assert_record_true(tree: MemoryTree, name: str) -> None:
    """Every file of the distribution has a row, and every row holds."""
    info = tree.distributions()[name].info_dir
    rows = {row.path: row.sha256 for row in parse_record(tree.files[f"{info}/RECORD"])}
    assert rows.pop(f"{info}/RECORD") is None
    assert rows == {path: tree.digest(path) for path in rows}
    assert {p for p in tree.files if p.startswith(f"{info}/")} <= {*rows, f"{info}/RECORD"}


# ----------------------------------------------------------------------------------------- wheel


def test_a_new_distribution_is_installed_like_by_pip() -> None:
    tree = MemoryTree(vllm_files())
    outcome = judged(wheel_layer(NEW), tree, NEW)
    assert outcome.state == NEEDED
    after = tree.after(outcome)
    assert versions(after) == {"vllm": "0.20.1", "lib": "2.0"}
    assert after.files["lib-2.0.dist-info/INSTALLER"] == b"spark-build\n"
    assert after.files["lib/pure.py"] == b"p = 1\n"
    assert not [path for path in after.files if ".data/" in path]
    assert_record_true(after, "lib")


def test_executables_stay_executable() -> None:
    changes = judged(wheel_layer(NEW), base(), NEW).changes
    modes = {path: content.mode for path, content in changes.items() if content}
    assert modes["lib/tool.sh"] == 0o755
    assert modes["lib/new.py"] == 0o644


def test_another_version_is_removed_and_equal_files_are_kept() -> None:
    outcome = judged(wheel_layer(NEW), base(), NEW)
    changes = outcome.changes
    assert changes["lib/old.py"] is None
    assert changes["lib-1.0.dist-info/METADATA"] is None
    assert "lib/same.py" not in changes
    after = base().after(outcome)
    assert versions(after)["lib"] == "2.0"
    assert_record_true(after, "lib")


def test_compiled_files_of_replaced_and_removed_modules_are_deleted() -> None:
    stale = ["lib/__pycache__/__init__.cpython-312.pyc", "lib/__pycache__/old.cpython-312.pyc"]
    kept = "lib/__pycache__/same.cpython-312.opt-1.pyc"
    tree = base(**dict.fromkeys([*stale, kept], b"pyc"))
    after = tree.after(judged(wheel_layer(NEW), tree, NEW))
    assert not set(stale) & set(after.files)


def test_an_intact_wheel_of_the_same_version_is_applied() -> None:
    tree = base()
    after = tree.after(judged(wheel_layer(NEW), tree, NEW))
    assert judged(wheel_layer(NEW), after, NEW).state == APPLIED


@pytest.mark.parametrize("damage", [b"v = 3\n", None])
def test_a_damaged_wheel_of_the_same_version_is_installed_again(damage: bytes | None) -> None:
    tree = base()
    after = tree.after(judged(wheel_layer(NEW), tree, NEW))
    if damage is None:
        del after.files["lib/__init__.py"]
    else:
        after.files["lib/__init__.py"] = damage
    outcome = judged(wheel_layer(NEW), after, NEW)
    assert outcome.state == NEEDED
    assert set(outcome.changes) == {"lib/__init__.py"}


EDIT = make_layer("edit", replace_op("v = 2", "v = 121", "lib/__init__.py"))


def test_a_file_edited_by_a_later_layer_still_belongs_to_the_wheel() -> None:
    layers, tree = [wheel_layer(NEW), EDIT], base()
    for step in judge_in_order(layers, tree, FakeSources(NEW), TARGET, {}):
        assert step.outcome.state == NEEDED
        tree.files = tree.after(step).files
    again = list(judge_in_order(layers, tree, FakeSources(NEW), TARGET, {}))
    assert [step.outcome.state for step in again] == [APPLIED, APPLIED]


def test_a_base_wheel_edited_by_a_layer_is_still_intact() -> None:
    """The base had the wheel already, so only the edit has a receipt."""
    tree = base()
    tree = tree.after(judged(wheel_layer(NEW), tree, NEW))
    (step,) = judge_in_order([EDIT], tree, FakeSources(), TARGET, {})
    tree = tree.after(step)
    assert judged(wheel_layer(NEW), tree, NEW).state == APPLIED
    tree.files["lib/__init__.py"] = b"v = 'edited by hand'\n"
    assert judged(wheel_layer(NEW), tree, NEW).state == NEEDED


BASE_WHEEL = {"dsl/shared.so": "base build\n", "dsl/base.py": ""}
CU13 = make_wheel("dsl-libs-cu13", "4.4", {"dsl/shared.so": "cuda 13\n", "dsl/cu13.py": ""})


@pytest.mark.parametrize(("last", "state"), [("dsl-libs-cu13", APPLIED), ("dsl-libs-base", NEEDED)])
def test_the_wheel_installed_last_decides(last: str, state: str) -> None:
    """Two distributions own one file: only the content says which of them won."""
    files = vllm_files() | dist_files("dsl-libs-base", "4.4", BASE_WHEEL)
    with zipfile.ZipFile(io.BytesIO(CU13.data)) as archive:
        files |= {name: archive.read(name) for name in archive.namelist()}
    if last == "dsl-libs-base":
        files["dsl/shared.so"] = BASE_WHEEL["dsl/shared.so"].encode()
    tree = MemoryTree(files)
    outcome = judged(wheel_layer(CU13), tree, CU13)
    assert outcome.state == state
    if state == NEEDED:
        after = tree.after(outcome)
        assert after.files["dsl/shared.so"] == b"cuda 13\n"
        assert after.files["dsl/base.py"] == b""
        assert judged(wheel_layer(CU13), after, CU13).state == APPLIED


def test_a_version_bound_to_another_distribution() -> None:
    layer = wheel_layer(make_wheel("lib", "1.5", {}), NEW, **{"version-of": "Lead_Package"})
    with_lead = MemoryTree(vllm_files() | dist_files("lead-package", "2.0", {}))
    assert [pin.version for pin in judged(layer, with_lead, NEW).inputs] == ["2.0"]
    without = judged(layer, vllm_files(), NEW)
    assert without.state == DRIFT
    assert "Lead_Package is not in the base" in without.reason


@pytest.mark.parametrize(
    ("pin", "target", "fits"),
    [
        ({"platform": "any", "python": "py3"}, TARGET, True),
        ({"platform": "linux/arm64", "python": "cp312"}, TARGET, True),
        ({"platform": "linux/amd64", "python": "cp312"}, TARGET, False),
        ({"platform": "linux/arm64", "python": "cp311"}, TARGET, False),
        ({"platform": "linux/arm64", "python": "cp311"}, Target("linux/arm64", "cp311"), True),
    ],
)
def test_a_pin_matches_the_platform_and_the_python(
    pin: dict[str, str], target: Target, fits: bool
) -> None:
    layer = altered(wheel_layer(NEW), pins={"wheel": [NEW.pin | pin]})
    if fits:
        assert judge(layer, base(), FakeSources(NEW), target).state == NEEDED
        return
    with pytest.raises(ApplyError, match=r"no pinned wheel of lib 2.0 for linux/arm64") as caught:
        judge(layer, base(), FakeSources(NEW), target)
    assert caught.value.hint == "spark-build layers pin lib"


# ---------------------------------------------------------------------------------------- remove


def remove_layer(**op: object) -> Layer:
    return make_layer("clean", {"op": "remove", "distribution": "lib", **op})


def test_remove_deletes_the_files_and_the_metadata() -> None:
    tree = base()
    after = tree.after(judged(remove_layer(), tree))
    assert after.files == vllm_files()
    assert judged(remove_layer(), after).state == APPLIED


def test_remove_keeps_what_another_distribution_owns() -> None:
    other = dist_files("other", "1", {"lib/same.py": "s = 0\n"})
    tree = MemoryTree(base().files | other)
    after = tree.after(judged(remove_layer(), tree))
    assert "lib/same.py" in after.files
    assert "lib/old.py" not in after.files


def test_remove_never_leaves_site_packages() -> None:
    tree = base()
    record = tree.files["lib-1.0.dist-info/RECORD"]
    tree.files["lib-1.0.dist-info/RECORD"] = record + b"../../../bin/lib,,\n/etc/lib.conf,,\n"
    paths = judged(remove_layer(), tree).changes
    assert not [path for path in paths if path.startswith(("/", ".."))]


@pytest.mark.parametrize(("unless", "state"), [("==1.0", APPLIED), ("==2.0", NEEDED)])
def test_remove_unless_a_version(unless: str, state: str) -> None:
    assert judged(remove_layer(unless=unless), base()).state == state


def test_remove_without_a_record_is_refused() -> None:
    tree = base()
    del tree.files["lib-1.0.dist-info/RECORD"]
    with pytest.raises(ApplyError, match=r"lib 1.0 has no RECORD"):
        judged(remove_layer(), tree)


def test_removing_an_absent_distribution_does_nothing() -> None:
    assert judged(remove_layer(**{"if": {"lib": ">=1.0"}}), vllm_files()).state == NOT_APPLICABLE


# ------------------------------------------------------------------------------- reading a wheel


def archive_of(files: dict[str, str], record: str) -> zipfile.ZipFile:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("x-1.dist-info/RECORD", record)
    return zipfile.ZipFile(out)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x/a.py", "has no hash in RECORD"),
        ("../a.py", "outside of the tree"),
        ("/a.py", "outside of the tree"),
        ("x/../../a.py", "outside of the tree"),
    ],
)
def test_a_wheel_without_hashes_is_refused(name: str, message: str) -> None:
    with pytest.raises(ApplyError, match=message):
        wheel_members(archive_of({name: ""}, ""))


def test_signature_files_need_no_hash() -> None:
    archive = archive_of({"x-1.dist-info/RECORD.jws": "{}"}, "")
    assert [member.path for member in wheel_members(archive)] == ["x-1.dist-info/RECORD"]


def test_a_vendored_distribution_is_not_mistaken_for_the_wheel() -> None:
    """setuptools and others carry ``_vendor/*.dist-info`` with a RECORD of its own."""
    files = {"x/_vendor/y-1.dist-info/RECORD": "", "x/_vendor/y-1.dist-info/METADATA": ""}
    wheel = make_wheel("x", "1", files)
    after = MemoryTree(vllm_files()).after(judged(wheel_layer(wheel), vllm_files(), wheel))
    assert "x/INSTALLER" not in after.files
    assert_record_true(after, "x")


def test_bytes_that_differ_from_the_pin_are_refused() -> None:
    content = Content(sha256_hex(b"good"), 4, load=lambda: b"evil", origin="x.whl:x.py")
    with pytest.raises(ApplyError, match=r"x.whl:x.py: sha256 is .*, pinned is") as caught:
        content.read()
    assert caught.value.code == 8
