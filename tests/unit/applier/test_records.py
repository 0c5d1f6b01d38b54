"""RECORD stays true: every row of it is what the file is, with layers and after them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from builder.applier.applying import finish
from builder.applier.receipts import (
    FileEntry,
    Original,
    Receipt,
    parse_record,
    receipt_bytes,
    receipt_path,
    receipts_of,
    row_path,
    true_records,
)
from builder.applier.states import APPLIED, NEEDED
from builder.applier.trees import Changes, Content, DirTree
from builder.applier.values import ApplyError, sha256_hex
from builder.images.engines.metadata import image_layers
from builder.proof.static import check_static
from builder.proof.target import VerifyTarget
from tests.unit.fakes import (
    BACKEND,
    FakeRunner,
    MemoryTree,
    altered,
    apply_to,
    copy_op,
    dist_files,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    record_line,
    replace_op,
    revert_from,
    snapshot,
    subject_of,
    vllm_files,
    write_tree,
)

if TYPE_CHECKING:
    from pathlib import Path

    from builder.applier.layers import Layer

RECORD = "vllm-0.20.1.dist-info/RECORD"
FIX = make_layer("fix", BACKEND, copy_op("vllm/new/kernel.py", b"K = 1\n"))
OTHER = make_layer("other", replace_op("import os", "import os  # other", "vllm/envs.py"))
GONE = make_layer(
    "gone",
    {
        "op": "diff",
        "diff": "--- a/vllm/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-OLD = 1\n",
    },
)
ON_TOP = make_layer("top", replace_op("'b12x'", "'b12x'  # top"))
FILES = vllm_files(old="OLD = 1\n", last="")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "site", FILES | dist_files("lib", "1", {"lib/__init__.py": ""}))


def untrue(root: Path) -> list[str]:
    """Rows that are not what the file is, and files that no row names."""
    tree = DirTree(root)
    wrong, named = [], set()
    for dist in tree.distributions().values():
        for row in parse_record(tree.read(f"{dist.info_dir}/RECORD") or b""):
            named.add(row.path)
            path = root / row.path
            if not path.is_file():
                wrong.append(f"{row.path} is not there")
            elif row.sha256 and (row.sha256, row.size) != (
                tree.digest(row.path),
                path.stat().st_size,
            ):
                wrong.append(f"{row.path} is another")
    here = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    own = (".spark-build/", "spark_build_env.pth")
    return wrong + [name for name in here if name not in named and not name.startswith(own)]


def record(root: Path) -> bytes:
    return (root / RECORD).read_bytes()


# ---------------------------------------------------------------------------------- a real folder


@pytest.mark.parametrize("layers", [[FIX], [GONE], [FIX, OTHER, GONE, ON_TOP]])
def test_apply_updates_record_and_revert_restores_it(site: Path, layers: list[Layer]) -> None:
    before = snapshot(site)
    apply_to(site, *layers)
    assert untrue(site) == []
    assert apply_to(site, *layers) == [APPLIED] * len(layers)
    revert_from(site)
    assert snapshot(site) == before


def test_the_record_check_detects_mistakes(site: Path) -> None:
    assert untrue(site) == []
    (site / "vllm/core.py").write_text("X = 1\n")
    (site / "vllm/extra.py").write_text("")
    (site / "vllm/last.py").unlink()
    assert untrue(site) == [
        "vllm/core.py is another", "vllm/last.py is not there", "vllm/extra.py",
    ]  # fmt: skip


@pytest.mark.parametrize("first", ["fix", "other", "gone"])
def test_one_of_several_layers_is_reverted(site: Path, tmp_path: Path, first: str) -> None:
    """What is left is what the others alone make of it, in whatever order they went."""
    layers = [FIX, OTHER, GONE]
    alone = write_tree(tmp_path / "alone", {p: (site / p).read_bytes() for p in FILES})
    apply_to(site, *layers)
    apply_to(alone, *(layer for layer in layers if layer.name != first))
    before = FILES[RECORD]
    assert revert_from(site, first) == [first]
    assert record(site) == record(alone)
    assert apply_to(site, *(x for x in layers if x.name != first)) == [APPLIED] * 2
    revert_from(site)
    assert record(site) == before


def test_recorded_compiled_files_are_removed_and_restored(site: Path) -> None:
    pyc = "vllm/__pycache__/core.cpython-312.pyc"
    write_tree(site, {pyc: b"old", RECORD: f"{pyc},,\n".encode() + record(site)})
    before = snapshot(site)
    apply_to(site, FIX)
    assert pyc.encode() not in record(site)
    assert untrue(site) == []
    revert_from(site)
    assert snapshot(site) == before


def test_later_rows_of_others_are_kept(site: Path) -> None:
    apply_to(site, FIX, OTHER)
    (site / "vllm/theirs.py").write_text("")
    (site / RECORD).write_bytes(record(site) + record_line("vllm/theirs.py", b"").encode())
    assert apply_to(site, FIX, OTHER) == [APPLIED] * 2, "it is no drift"
    revert_from(site, "fix")
    assert untrue(site) == []
    revert_from(site)
    assert untrue(site) == []
    assert b"vllm/theirs.py" in record(site)


def test_a_newer_layer_version_keeps_the_original_rows(site: Path) -> None:
    before = snapshot(site)
    apply_to(site, FIX)
    apply_to(site, altered(FIX, summary="newer"), make_layer("more", copy_op("vllm/m.py", b"")))
    apply_to(site, make_layer("fix", replace_op("'b12x'", "'b12x'  # newer")))
    assert untrue(site) == []
    revert_from(site)
    assert snapshot(site) == before


def test_a_wheel_that_a_later_layer_edits(site: Path) -> None:
    wheel = make_wheel("lib", "2", {"lib/__init__.py": "NEW = 1\n"})
    layers = (
        make_layer("lib", {"op": "wheel", "distribution": "lib", "version": "2"}, wheels=[wheel]),
        make_layer("edit", replace_op("NEW = 1", "NEW = 2", "lib/__init__.py")),
    )
    before = snapshot(site)
    apply_to(site, *layers, wheels=[wheel])
    assert untrue(site) == []
    assert apply_to(site, *layers, wheels=[wheel]) == [APPLIED] * 2
    revert_from(site, "edit")
    assert untrue(site) == []
    assert apply_to(site, layers[0], wheels=[wheel]) == [APPLIED]
    revert_from(site)
    assert snapshot(site) == before


def test_a_damaged_wheel_is_installed_again(site: Path) -> None:
    wheel = make_wheel("lib", "2", {"lib/__init__.py": "NEW = 1\n", "lib/b.py": ""})
    layers = (
        make_layer("lib", {"op": "wheel", "distribution": "lib", "version": "2"}, wheels=[wheel]),
        make_layer("edit", replace_op("NEW = 1", "NEW = 2", "lib/__init__.py")),
    )
    before = {path: (site / path).read_bytes() for path in FILES}
    apply_to(site, *layers, wheels=[wheel])
    (site / "lib/__init__.py").write_text("")
    assert apply_to(site, *layers, wheels=[wheel]) == [NEEDED, NEEDED]
    assert untrue(site) == []
    revert_from(site)
    assert not (site / "lib-2.dist-info").exists()
    assert untrue(site) == []
    assert {path: (site / path).read_bytes() for path in FILES} == before


def test_receipts_name_record_without_its_digest_in_an_image(site: Path) -> None:
    """Else a receipt, and with it a layer of the image, would change with the layers below."""
    (decision,) = make_plan_of(fake_base(FILES), FIX).decisions
    assert decision.receipt is not None
    assert decision.receipt.records == {RECORD: Original()}
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    assert receipt.records is not None
    assert receipt.records[RECORD].before == sha256_hex(FILES[RECORD])


def test_the_bytes_of_a_receipt_are_unchanged() -> None:
    """Published images have them; `null` stands only for a file that does not exist."""
    receipt = Receipt(
        layer="fix",
        layer_digest="d",
        variant=None,
        sequence=2,
        env={"A": "ü"},
        serve_flags=["--x"],
        moe_serve_flags=(),
        files={
            "vllm/a.py": FileEntry("b" * 64, 0o644, 5, None, "a" * 64, ("replace",)),
            "vllm/b.py": FileEntry(None, after="a" * 64, ops=["copy"], made="vllm/b.py"),
        },
        package="vllm",
        records={RECORD: Original()},
        compiled_with="other",
    )
    expected = {
        "compiled_with": "other",
        "env": {"A": "ü"},
        "files": {
            "vllm/a.py": {
                "after": "a" * 64,
                "before": "b" * 64,
                "mode": 420,
                "mtime_ns": 5,
                "ops": ["replace"],
            },
            "vllm/b.py": {
                "after": "a" * 64,
                "before": None,
                "made": "vllm/b.py",
                "ops": ["copy"],
            },
        },
        "layer": "fix",
        "layer_digest": "d",
        "moe_serve_flags": [],
        "package": "vllm",
        "records": {RECORD: {}},
        "schema": 1,
        "sequence": 2,
        "serve_flags": ["--x"],
        "variant": None,
    }
    assert receipt_bytes(receipt).decode() == json.dumps(expected, indent=1) + "\n"


@pytest.mark.parametrize(
    "records",
    [[], {"../RECORD": {}}, {"vllm/core.py": {}}, {RECORD: {"before": "../x"}}, {RECORD: 1}],
)
def test_malformed_record_entries_in_a_receipt(site: Path, records: object) -> None:
    apply_to(site, FIX)
    path = site / receipt_path("fix")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "records": records}))
    with pytest.raises(ApplyError, match="is damaged"):
        revert_from(site)


# ------------------------------------------------------------------------------------------- rows


def test_rows_keep_their_position_and_format() -> None:
    changed = Content.of(b"new\n")
    files = FILES | {
        RECORD: b'"vllm/a, b.py",sha256=AAAA,1\r\nvllm/core.py,,\r\nvllm/last.py,sha256=AAAA,1'
    }
    paths = ("vllm/a, b.py", "vllm/core.py", "vllm/last.py", "vllm/z.py")
    made = true_records(MemoryTree(files), dict.fromkeys(paths, changed), "vllm")
    new = made[RECORD]
    assert new is not None
    row = record_line("X", b"new\n").removeprefix("X").strip()
    assert new.read().decode() == (
        f'"vllm/a, b.py"{row}\r\nvllm/core.py,,\r\nvllm/last.py{row}\r\nvllm/z.py{row}\r\n'
    )


@pytest.mark.parametrize(
    ("line", "path"),
    [("a.py,sha256=x,1\n", "a.py"), ('"a,b.py",,\r\n', "a,b.py"), ("\n", ""), ('"a\n', "")],
)
def test_owner_of_a_row(line: str, path: str) -> None:
    assert row_path(line) == path


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("lib/sub/new.py", "lib-1.dist-info/RECORD"),
        ("vllm/deep/er/new.py", RECORD),
        ("new.py", RECORD),
    ],
)
def test_a_new_file_belongs_where_its_neighbours_do(path: str, owner: str) -> None:
    tree = MemoryTree(FILES | dist_files("lib", "1", {"lib/__init__.py": ""}))
    assert list(true_records(tree, {path: Content.of(b"")}, "vllm")) == [owner]


def test_a_distribution_without_a_record_gets_none() -> None:
    files = {path: data for path, data in FILES.items() if path != RECORD}
    changes: Changes = {"vllm/core.py": Content.of(b""), "vllm/new.py": Content.of(b"")}
    assert true_records(MemoryTree(files), changes, "vllm") == {}


def test_every_record_that_lists_a_file_is_updated() -> None:
    tree = MemoryTree(FILES | dist_files("also", "1", {"vllm/core.py": "theirs\n"}))
    made = true_records(tree, {"vllm/core.py": Content.of(b"new\n")}, "vllm")
    assert sorted(made) == ["also-1.dist-info/RECORD", RECORD]


# ----------------------------------------------------------------------------------------- images


def test_an_image_has_one_record_from_the_last_layer() -> None:
    plan = make_plan_of(fake_base(FILES, kind="image"), FIX, OTHER)
    layers = image_layers(plan)
    path = f"{plan.base.site_packages}/{RECORD}"
    assert [name for name, files in layers if path in files] == ["spark-build"]
    content = dict(layers)["spark-build"][path]
    assert content is not None
    rows = {row.path: row.sha256 for row in parse_record(content.read())}
    for name, change in plan.changes.items():
        if change is not None and name in ("vllm/core.py", "vllm/envs.py", "vllm/new/kernel.py"):
            assert rows[name] == change.sha256


def test_an_overlay_has_no_record(tmp_path: Path) -> None:
    """The image's own RECORD lists scripts and compiled files, which the wheel's does not."""
    wheel = make_wheel("lib", "2", {"lib/__init__.py": "NEW = 1\n"})
    lib = make_layer("lib", {"op": "wheel", "distribution": "lib", "version": "2"}, wheels=[wheel])
    edit = make_layer("edit", replace_op("NEW = 1", "NEW = 2", "lib/__init__.py"))
    plan = make_plan_of(fake_base(FILES), FIX, GONE, lib, edit, wheels=[wheel])
    layers = image_layers(plan)
    records = [path for _, files in layers for path in files if path.endswith("/RECORD")]
    assert [path.split("/")[-2] for path in records] == ["lib-2.dist-info"]
    own = FILES[RECORD] + b"../../../bin/vllm,sha256=AAAA,9\nvllm/__pycache__/core.pyc,,\n"
    root = write_tree(tmp_path / "image", FILES | {RECORD: own})
    prefix = f"{plan.base.site_packages}/"
    for _, files in layers:
        copied = {path: content for path, content in files.items() if path.startswith(prefix)}
        write_tree(root, {p.removeprefix(prefix): c.read() for p, c in copied.items() if c})
    finish(root)
    found = {row.path: row.sha256 for row in parse_record(record(root))}
    assert {"../../../bin/vllm", "vllm/__pycache__/core.pyc"} <= set(found)
    found |= {
        r.path: r.sha256 for r in parse_record((root / "lib-2.dist-info/RECORD").read_bytes())
    }
    for path in ("vllm/core.py", "vllm/new/kernel.py", "lib/__init__.py"):
        assert found[path] == sha256_hex((root / path).read_bytes())
    assert "vllm/old.py" not in found
    done = record(root)
    finish(root)
    assert record(root) == done


# -------------------------------------------------------------------------------------- verifying


def verdict(root: Path, *layers: Layer) -> tuple[str, str]:
    """What level ``static`` says of the files: pass or fail, and which one."""
    plan = make_plan_of(fake_base(FILES), *layers)
    assert [d.outcome.state for d in plan.needed] == [NEEDED] * len(layers)
    target = VerifyTarget(
        name="dir",
        subject=subject_of(DirTree(root), "dir"),
        plan=plan.document,
        layers=layers,
        runner=FakeRunner(),
    )
    check = next(c for c in check_static(target) if c.name == "no other file touched")
    return check.status, check.where


def test_verification_checks_changed_files_against_it(site: Path) -> None:
    apply_to(site, FIX)
    assert verdict(site, FIX) == ("pass", "")
    (site / RECORD).write_bytes(FILES[RECORD])  # as an older spark-build left it
    assert verdict(site, FIX) == ("fail", "vllm/core.py")


def test_verification_finds_a_new_file_that_is_not_listed(site: Path) -> None:
    apply_to(site, FIX)
    rows = [row for row in record(site).splitlines(keepends=True) if b"kernel" not in row]
    (site / RECORD).write_bytes(b"".join(rows))
    assert verdict(site, FIX) == ("fail", "vllm/new/kernel.py")


def test_verification_of_an_image_from_an_older_spark_build(site: Path) -> None:
    """Its receipts say nothing of RECORD, and explain the files themselves."""
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    older = dataclasses.replace(receipt, records=None)
    (site / receipt_path("fix")).write_bytes(receipt_bytes(older))
    (site / RECORD).write_bytes(FILES[RECORD])
    assert verdict(site, FIX) == ("pass", "")
