"""What the matrix looks at, and the forms that it is shown in."""

from __future__ import annotations

import base64
import csv
import datetime
import io
import re
import tomllib
from typing import TYPE_CHECKING

import pytest

from benchmarks import matrix_reading
from builder.common.paths import data_dir, package_file
from builder.common.pypi import NotOnIndex, PackageIndex, WheelFile
from builder.errors import UsageError
from builder.layers.catalog import Catalog
from builder.layers.decisions import Evidence, around
from builder.pipeline import modlayer
from builder.pipeline.matrix import Asked, Matrix, MatrixRow, catalog_of, selections
from builder.pipeline.matrixpage import markdown, matrix_page, table
from builder.pipeline.options import MatrixOptions
from builder.proof.modrun import ModRun
from tests.unit.fakes import every_base_is, fake_base, layer_text, vllm_files

if TYPE_CHECKING:
    from pathlib import Path

MARKUP = "<script>alert(1)</script>"
MADE = datetime.datetime(2026, 11, 24, tzinfo=datetime.UTC)
NAME = "flashinfer-b12x-store-wait"
PATCH = "\n".join(
    [
        "--- a/vllm/core.py",
        "+++ b/vllm/core.py",
        "@@ -1,5 +1,5 @@",
        " BACKEND = 'cutlass'",
        " ",
        " ",
        " def run():",
        "-    return BACKEND",
        "+    return 'b12x'",
        "",
    ]
)


def row(vllm: str, state: str, **more: object) -> MatrixRow:
    values = {
        "vllm": vllm, "release": vllm, "states": {NAME: state}, "served": True,
        "reasons": {NAME: f"=because {MARKUP}"}, "uploaded": "2026-05-04",
        "packages": {"vllm": vllm, "flashinfer-python": "0.6.18"}, **more,
    }  # fmt: skip
    return MatrixRow(**values)  # type: ignore[arg-type]


PLACE = Evidence(file="flashinfer/x.py", found="old", anchor=f"=a {MARKUP}", line=7)
DOCUMENT = Matrix(
    layers=(NAME,),
    rows=(
        row("0.27.0", "needed", evidence={NAME: (PLACE,)}),
        row("0.28.0", "needed"),
        row("0.29.0", "upstream", since={NAME: "flashinfer-python 0.6.18"}, yanked=""),
    ),
)


def page(diffs: object = lambda *_: [("x.py", f"@@\n-{MARKUP}\n")]) -> str:
    return matrix_page([DOCUMENT], Catalog.discover(), diffs, MADE)  # type: ignore[arg-type]


def test_the_page_is_one_file_and_what_is_foreign_is_text() -> None:
    text = page()
    assert MARKUP not in text
    assert "&lt;script&gt;alert(1)" in text
    assert text.count("<script>") == 1
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", text)


def test_every_link_of_the_page_leads_somewhere() -> None:
    text = page()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    links = {link for link in re.findall(r'href="#([^"]+)"', text) if link}
    assert links <= set(ids)
    assert {f"at:{NAME}:0.29.0", f"{NAME}:0.28.0"} <= set(ids)


def test_a_difference_is_asked_for_only_where_a_state_changes() -> None:
    asked: list[tuple[str, str, str]] = []

    def diffs(name: str, before: MatrixRow, after: MatrixRow) -> list[tuple[str, str]]:
        asked.append((name, before.vllm, after.vllm))
        return []

    page(diffs)
    assert asked == [(NAME, "0.28.0", "0.29.0")]


def test_defects_are_where_their_layer_is_needed() -> None:
    text = page()
    assert 'id="at:defect:gemm-store-wait:0.27.0"' in text
    assert 'id="at:defect:gemm-store-wait:0.29.0"' in text


def test_a_release_that_nobody_ran_is_not_said_to_be_without_a_defect() -> None:
    versions = {"0.28.0": "not there", "0.32.0": "not looked for", "0.33.0": "present"}
    document = Matrix(layers=(NAME,), rows=tuple(row(v, "needed") for v in versions))
    text = matrix_page([document], Catalog.discover(), lambda *_: [], MADE)
    for version, words in versions.items():
        cell = text.partition(f'href="#at:defect:package-b12x:{version}"')[2].partition("</td>")[0]
        assert f'<span class="word">{words}</span>' in cell


def test_computed_values_are_those_of_the_page_about_them() -> None:
    """Only on the releases that were run, each by itself."""
    versions = ("0.6.16.post3", "0.6.17", "0.6.18.post1")
    rows = tuple(row("", "needed", release=v, packages={"flashinfer-python": v}) for v in versions)
    document = Matrix(package="flashinfer-python", layers=(NAME,), rows=rows)
    text = matrix_page([document], Catalog.discover(), lambda *_: [], MADE)
    part = text.partition('id="numbers"')[2].partition("</section>")[0]
    assert "0.6.17" not in re.sub("<[^>]*>", "", part)
    words = re.findall(r'<span class="word">([^<]*)</span>', part.partition("several tiles a")[2])
    assert words[:2] == ["wrong values and race", "right"]
    assert "at:numbers:b12x-GEMM-several-tiles-a-block:0.6.16.post3" in text
    table = (data_dir("docs") / "kernel-defects.md").read_text("utf-8")
    assert "| b12x GEMM, several tiles a block | wrong values and race |" in table


def test_pages_are_links_only_where_there_is_a_site() -> None:
    name = "docs/upstream/flashinfer-b12x-moe-barrier/pull-request"
    assert f'href="./{name}.html"' in matrix_page(
        [DOCUMENT], Catalog.discover(), lambda *_: [], MADE, docs="."
    )
    assert f"{name}.md" in page()
    assert f"{name}.html" not in page()


def test_defects_are_those_of_the_page_about_them() -> None:
    defects = tomllib.loads(package_file("data", "defects.toml").read_text("utf-8"))["defect"]
    told = (data_dir("docs") / "kernel-defects.md").read_text("utf-8")
    table = told.partition("## What upstream knows")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert rows == ["defect", *(defect["name"] for defect in defects)]
    for defect in defects:
        assert f"| {defect['name']} | {defect['upstream']} |" in told
        assert (data_dir("docs") / defect["page"]).is_file()
        assert defect.get("layer", NAME) in Catalog.discover().folders


def test_markdown_has_ranges_of_releases() -> None:
    assert markdown(DOCUMENT).splitlines() == [
        "| layer | needed | in the release |",
        "| --- | --- | --- |",
        f"| `{NAME}` | 0.27.0 to 0.28.0 | 0.29.0 |",
    ]


def test_csv_has_a_line_for_each_layer_and_release_and_no_formula() -> None:
    head, first, *_, last = csv.reader(io.StringIO(table(DOCUMENT)))
    cells = dict(zip(head, first, strict=True))
    assert (cells["state"], cells["file"], cells["line"]) == ("needed", "flashinfer/x.py", "7")
    assert cells["anchor"].startswith("'=")
    assert cells["reason"].startswith("'=")
    assert dict(zip(head, last, strict=True))["yanked"] == "yes"


def test_a_difference_is_shown_around_the_anchor_without_common_indentation() -> None:
    old = "".join(f"        line {n}\n" for n in range(100)).encode()
    new = old.replace(b"line 10\n", b"line ten\n").replace(b"line 90\n", b"anchor\n")
    text = around(old, new, ["anchor"])
    assert "+anchor\n" in text
    assert "line ten" not in text
    assert text.endswith("and 1 more places of this file\n")
    assert around(old, old, []) == ""
    assert around(None, new, []) == "the file is new\n"
    assert around(old, None, []) == "the file is gone\n"


def test_without_names_everything_is_looked_at_once() -> None:
    options = MatrixOptions()
    catalog = catalog_of(options)
    chosen = selections(options, catalog)
    assert {layer.name for s in chosen for layer in s.layers} == set(catalog.folders)
    alone = selections(MatrixOptions(package="nvidia-cutlass-dsl"), catalog)
    assert all(len(s.layers) == 1 for s in alone)
    assert {s.layers[0].package for s in alone} == {"nvidia-cutlass-dsl"}
    with pytest.raises(UsageError, match="none of these layers changes"):
        selections(MatrixOptions(layers=("b12x-env",), package="nvidia-cutlass-dsl"), catalog)


def test_your_own_layers_come_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    op = 'op = "replace"\nfile = "vllm/core.py"\nold = "BACKEND"\nnew = "b12x"\ncount = 2'
    (tmp_path / "mine/layer.toml").write_text(layer_text(op))
    options = MatrixOptions(patches=(tmp_path,))
    assert [s.name for s in selections(options, catalog_of(options))] == ["mine"]


def mod_makes(monkeypatch: pytest.MonkeyPatch, outside: tuple[str, ...] = ()) -> None:
    """Stand in for the isolated run of a mod: what the patch makes of the file."""
    new = vllm_files()["vllm/core.py"].replace(b"return BACKEND", b"return 'b12x'")
    run = ModRun(
        status=0, over="", tail=(), needed=(), lacked=(), outside=outside, links=(), large=(),
        files={"vllm/core.py": base64.b64encode(new).decode()},
    )  # fmt: skip
    monkeypatch.setattr(modlayer, "run_mod", lambda *_: run)


@pytest.mark.parametrize("as_mod", [False, True])
def test_a_patch_file_and_a_mod_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, as_mod: bool
) -> None:
    path = tmp_path / "my fix.patch"
    path.write_text(PATCH)
    if as_mod:
        path = tmp_path / "my-fix"
        path.mkdir()
        (path / "run.sh").write_text("python3 edit.py\n")
        mod_makes(monkeypatch)
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [])
    every_base_is(monkeypatch, fake_base(vllm_files()))
    document = Asked(MatrixOptions(mods=(path,), releases="0.20.1")).matrix()
    assert document.layers == ("my-fix",)
    assert document.rows[0].states == {"my-fix": "needed"}
    (place,) = document.rows[0].evidence["my-fix"]
    assert (place.line, place.anchor) == (5, "return BACKEND")


def test_a_change_that_a_layer_before_makes_is_not_the_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same patch as two layers: the second one is no proof that the release has it."""
    op = 'op = "replace"\nfile = "vllm/core.py"\nold = "\'cutlass\'"\nnew = "\'b12x\'"\ncount = 1'
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layer.toml").write_text(layer_text(op))
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [])
    every_base_is(monkeypatch, fake_base(vllm_files()))
    options = MatrixOptions(patches=(tmp_path,), layers=("one", "two"), releases="0.20.1")
    document = Asked(options).matrix()
    (row,) = document.rows
    assert row.states == {"one": "needed", "two": "applied"}
    assert row.after == {"two": "one"}
    assert row.reasons["two"] == "layer one before it makes this change"
    assert "| `two` |  |  | 0.20.1 |" in markdown(document)
    monkeypatch.undo()
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [])
    had = {**vllm_files(), "vllm/core.py": b"BACKEND = 'b12x'\n"}
    every_base_is(monkeypatch, fake_base(had))
    (row,) = Asked(options).matrix().rows
    assert row.states == {"one": "applied", "two": "applied"}
    assert row.after == {}


def test_what_of_a_mod_is_not_looked_at_comes_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mod").mkdir()
    (tmp_path / "mod/run.sh").write_text("python3 edit.py\n")
    mod_makes(monkeypatch, ("/workspace/chat.jinja",))
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [])
    every_base_is(monkeypatch, fake_base(vllm_files()))
    asked = Asked(MatrixOptions(mods=(tmp_path / "mod",), releases="0.20.1"))
    assert capsys.readouterr().err == "  mod: made of its run on pypi:vllm==0.20.1\n"
    assert asked.unread == ["mod: no op for: /workspace/chat.jinja (not in site-packages)"]


def test_wheels_of_a_directory_come_before_the_index(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no wheel"):
        PackageIndex().hold_folder(tmp_path)
    name = "vllm-0.34.0.dev1+gabc-cp38-abi3-manylinux_2_31_aarch64.whl"
    (tmp_path / name).write_bytes(b"not read here")
    index = PackageIndex()
    (held,) = index.hold_folder(tmp_path)
    assert held.version == "0.34.0.dev1+gabc"
    assert index.local[held.sha256] == tmp_path / name
    (tmp_path / "x.whl").write_bytes(b"")
    with pytest.raises(UsageError, match=r"x\.whl cannot be used as a wheel"):
        PackageIndex().hold_folder(tmp_path)


def test_what_a_first_index_lacks_comes_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    file = WheelFile(filename="vllm-1-py3-none-any.whl", url="", sha256="0" * 64, uploaded="")
    rest = PackageIndex("https://rest.example.invalid")
    first = PackageIndex("https://first.example.invalid", rest=rest)

    def page_of(self: PackageIndex, name: str, _kind: str) -> list[WheelFile]:
        if (self is first) != (name == "vllm"):
            raise NotOnIndex(name)
        return [file]

    monkeypatch.setattr(PackageIndex, "_fetch_page", page_of)
    assert first.wheels("vllm") == [file]
    assert first.key_of("vllm") == first.key
    assert first.wheels("torch") == [file]
    assert first.key_of("torch") == rest.key


def test_the_benchmark_compares_the_same_wheels() -> None:
    """pip gets vLLM and what the layers change, in the versions that the matrix read."""
    rows = [{"vllm": "0.33.0", "packages": {"vllm": "0.33.0", "flashinfer-python": "0.7.2"}}]
    found = dict(matrix_reading.wheels({"rows": rows}, [NAME, "vllm-b12x-reachable"]))
    assert found == {"0.33.0": ["vllm==0.33.0", "flashinfer-python==0.7.2"]}


def test_the_benchmark_reports_ratios_of_each_round() -> None:
    def cost(seconds: float, disk: int) -> matrix_reading.Cost:
        return matrix_reading.Cost(seconds=seconds, cpu=1.0, disk=disk, memory=1)

    whole = {"pip download": cost(6, 100), "unzip": cost(4, 300)}
    lines: list[str] = []
    matrix_reading.report(
        [{"cold": cost(2, 5), **whole}, {"cold": cost(2, 5), **whole}], lines.append
    )
    assert lines[1].split()[-2:] == ["0.200", "0.050"]
