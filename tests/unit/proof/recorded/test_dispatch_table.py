"""The release table: made of records alone, and found out when either is stale."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builder.__main__ import run
from builder.common.document import plain, read
from builder.common.files import write_atomically
from builder.errors import UsageError
from builder.layers.catalog import Catalog
from builder.pipeline.matrix import Matrix, MatrixRow
from builder.probes.dispatch_expect import Answer, Failure
from builder.proof.checks import KINDS, Check
from builder.proof.recorded import (
    Outcome,
    Record,
    Records,
    choices_table,
    default_table,
    file_of,
    inputs_digest,
    profile_parts,
    ranges,
    read_records,
    record_bytes,
    render,
    setting,
    stale_records,
    unmet,
)
from tests.documents import validated, validator
from tests.unit.fakes import altered

Checker = Callable[[Path], tuple[int, str]]

CATALOG = Catalog.discover()
DIGEST = f"sha256:{'0' * 64}"
DOCS = Path(__file__).parents[4] / "docs"


def record_of(release: str, **selected: str) -> Record:
    """A record in which every kind is served by a kernel of its own name."""
    return read(written(release, **selected), Record)


def written(release: str, **selected: str) -> dict[str, Any]:
    """The same as it is in a file."""
    kinds = {kind: {"selected": selected.get(kind, f"{kind}LinearKernel")} for kind in KINDS}
    profile = {
        "layers": {"fix": "needed", "other": "upstream"},
        "env": {"VLLM_X": "1"},
        "flags": ["--linear-backend", "marlin"],
        "kinds": kinds,
    }
    return {
        "schema": 1,
        "vllm": release,
        "base": {"platform": "linux/arm64", "digest": DIGEST, "packages": {"vllm": release}},
        "default": kinds,
        "choices": {kind: {"--linear-backend marlin": "Marlin"} for kind in KINDS},
        "profiles": {
            name: {"inputs": inputs_digest(CATALOG.select([name])), **copy.deepcopy(profile)}
            for name in CATALOG.profile_files
        },
        "real": [],
        "simulated": ["device: NVIDIA GB10"],
    }


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """Two releases, and the table that is made of them."""
    for release in ("0.9.0", "0.10.0"):
        write_atomically(file_of(tmp_path, release), record_bytes(record_of(release)))
    text = render(read_records(tmp_path), CATALOG)
    (tmp_path / "table.md").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Checker:
    """Runs ``dispatch table --check`` on a directory; its exit code and what it said."""

    def run_check(folder: Path) -> tuple[int, str]:
        words = ["--evidence", str(folder), "--to", str(folder / "table.md")]
        code = run(["dispatch", "table", "--check", *words])
        return code, capsys.readouterr().err

    return run_check


def test_json_output(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = evidence / "table.md"
    words = ["dispatch", "table", "--evidence", str(evidence), "--to", str(file), "--json"]
    assert run(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"schema": 1, "file": str(file), "releases": 2, "written": True}


# --------------------------------------------------------------------------------------- this repo


def test_every_profile_meets_its_expectations_in_every_release() -> None:
    profiles = [CATALOG.profile(name) for name in CATALOG.profile_files]
    wrong = {
        (record.vllm, profile.name): found
        for record in read_records(DOCS / "evidence")
        for profile in profiles
        if (found := unmet(record, profile))
    }
    assert wrong == {}


def test_the_evidence_matches_its_schema_and_a_broken_record_does_not() -> None:
    records = read_records(DOCS / "evidence")
    document = validated("dispatch-ask", plain(Records(records=tuple(records))))
    broken = document["records"][0]
    broken["default"]["fp8-block"]["refused"] = "and yet it selected something"
    with pytest.raises(AssertionError, match="fp8-block"):
        validated("dispatch-ask", {"schema": 1, "records": [broken]})


def test_the_evidence_is_small() -> None:
    sizes = [path.stat().st_size for path in (DOCS / "evidence").iterdir()]
    assert len(sizes) >= 25
    assert sum(sizes) < 1_000_000


# ------------------------------------------------------------------------------------------- stale


def test_a_fresh_table_passes(evidence: Path, check: Checker) -> None:
    assert check(evidence) == (0, "")


def test_an_edited_table_is_stale(evidence: Path, check: Checker) -> None:
    path = evidence / "table.md"
    path.write_text(path.read_text().replace("nvfp4-moe", "MARLIN", 1))
    code, said = check(evidence)
    assert code == 9
    assert "does not match the records" in said
    assert "spark-build dispatch table" in said


def test_a_missing_table_is_stale(evidence: Path, check: Checker) -> None:
    (evidence / "table.md").unlink()
    assert check(evidence)[0] == 9


def test_a_record_of_another_profile_is_stale(evidence: Path, check: Checker) -> None:
    record = written("0.10.0")
    record["profiles"]["marlin"]["inputs"] = "0" * 16
    write_atomically(file_of(evidence, "0.10.0"), record_bytes(read(record, Record)))
    code, said = check(evidence)
    assert code == 9
    assert "made with other profiles: vllm 0.10.0: marlin" in said
    assert "spark-build dispatch ask" in said


def test_a_record_without_a_profile_is_stale() -> None:
    record = written("0.10.0")
    del record["profiles"]["marlin"]
    assert stale_records([read(record, Record)], CATALOG) == ["vllm 0.10.0: marlin"]


def test_a_changed_record_makes_the_table_stale(evidence: Path, check: Checker) -> None:
    record = record_of("0.10.0", **{"fp8-block": "TritonFp8BlockScaledMMKernel"})
    write_atomically(file_of(evidence, "0.10.0"), record_bytes(record))
    assert check(evidence)[0] == 9


def test_a_module_missing_in_the_sandbox_is_not_a_refusal() -> None:
    assert Outcome(refused="ValueError: no kernel").kernel == "refused"
    assert Outcome(refused="ModuleNotFoundError: No module named 'triton'").kernel == "not known"


def test_descriptions_are_not_inputs() -> None:
    """A note that is written better does not send anybody back to twenty-five releases."""
    selection = CATALOG.select(["marlin-env"])
    (layer,) = selection.layers
    first, *more = layer.rendered["variants"]
    noted = {**first, "notes": ["other words"]}
    said = altered(layer, summary="other words", variants=[noted, *more])
    assert inputs_digest(type(selection)((said,), selection.profiles)) == inputs_digest(selection)
    said = altered(layer, variants=[{**noted, "ops": []}, *more])
    assert inputs_digest(type(selection)((said,), selection.profiles)) != inputs_digest(selection)


# ----------------------------------------------------------------------------------------- records


def test_records_come_oldest_first(evidence: Path) -> None:
    assert [record.vllm for record in read_records(evidence)] == ["0.9.0", "0.10.0"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("vllm-0.9.0.json", "{", "is not a record of a release"),
        ("vllm-0.9.0.json", "[]", "is not a record of a release"),
        ("vllm-0.9.0.json", "{}", "is not a record of a release: Object missing"),
        ("vllm-0.9.0.json", json.dumps({**written("0.9.0"), "vllm": "?"}), "Invalid version"),
        ("vllm-0.9.0.json", json.dumps({"vllm": "0.9.0", "schema": 0}), r"at `\$\.schema`"),
        ("vllm-0.8.json", json.dumps(written("0.9.0")), "of that release: it is of 0.9.0"),
    ],
)
def test_malformed_records_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_records(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path, check: Checker) -> None:
    code, said = check(tmp_path)
    assert code == 2
    assert "spark-build dispatch ask" in said


# ------------------------------------------------------------------------------------------- table


def test_consecutive_equal_releases_are_merged() -> None:
    records = [record_of(f"0.{number}.0") for number in range(1, 6)]
    assert ranges(records, list("aabaa")) == [
        ("0.1.0 to 0.2.0", "a"),
        ("0.3.0", "b"),
        ("0.4.0 to 0.5.0", "a"),
    ]


def test_equal_releases_share_a_row_and_each_kind_has_a_column() -> None:
    other = {"fp8-block": "TritonFp8BlockScaledMMKernel"}
    records = [record_of("0.9.0"), record_of("0.10.0"), record_of("0.11.0", **other)]
    first, line, *body = default_table(records).splitlines()
    assert first == f"| vLLM | {' | '.join(KINDS.values())} |"
    assert line.count("---") == len(KINDS) + 1
    assert body[0] == f"| 0.9.0 to 0.10.0 | {' | '.join(KINDS)} |"
    assert [row.split(" | ")[0] for row in body] == ["| 0.9.0 to 0.10.0", "| 0.11.0"]


def test_an_expected_refusal_is_a_limit_and_an_unexpected_one_is_not() -> None:
    found = [written("0.20.1"), written("0.22.1"), written("0.24.0")]
    for record in found:
        kinds = record["profiles"]["b12x-full"]["kinds"]
        message = "ValueError: 'FLASHINFER_B12X' does not support this"
        kinds["w4a16-moe"] = {"refused": message}
    records = [read(record, Record) for record in found]
    table, limits, _ = profile_parts(records, CATALOG.profile("b12x-full"))
    first, second = table.splitlines()[2:]
    assert first.startswith("| 0.20.1 to 0.22.1 |")
    assert first.endswith("| **expected refusal** |")
    assert "refused (EXPECTED Using 'FLASHINFER_B12X'" in second
    assert limits == ["W4A16 MoE models will not start with this profile: 0.20.1 to 0.22.1"]


def test_the_documentation_has_few_rows() -> None:
    """Twenty-five releases, and most answer as the one before."""
    text = (DOCS / "dispatch.md").read_text("utf-8")
    for part in text.split("\n## ")[1:5]:
        assert part.count("\n| 0.") < 12, part.partition("\n")[0]


def test_choices_with_the_same_result_share_a_row() -> None:
    first, second = written("0.9.0"), written("0.10.0")
    first["choices"]["fp8-block"] = {"--a 1": "MarlinKernel", "--b 2": "MarlinKernel", "X=1": "Y"}
    second["choices"]["fp8-block"] = {
        "--a 1": "MarlinKernel",
        "--b 2": "MarlinKernel",
        "X=1": {"refused": "ValueError: no"},
        "--c 3": {"not-applicable": "no such package"},
    }
    records = [read(first, Record), read(second, Record)]
    assert choices_table(records, "fp8-block").splitlines()[2:] == [
        "| `X=1` | 0.9.0: Y<br>0.10.0: refused |",
        "| `--a 1`<br>`--b 2` | 0.9.0 to 0.10.0: MarlinKernel |",
        "| `--c 3` | 0.10.0: n/a (no such package) |",
    ]


def test_expected_kernels_are_marked_and_others_are_reported() -> None:
    profile = CATALOG.profile("marlin")
    record = written("0.33.0")
    record["profiles"]["marlin"]["kinds"]["nvfp4-linear"] = {
        "selected": "MarlinNvFp4LinearKernel",
        "line": "Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
    }
    good = read(record, Record)
    text = render([good], CATALOG)
    assert "**MarlinNvFp4**" in text
    wanted = "Using 'MARLIN' NvFp4 MoE backend"
    assert unmet(good, profile)["nvfp4-moe"] == wanted
    assert f"**nvfp4-moe (EXPECTED {wanted})**" in text


def test_an_unsupported_release_has_a_reason() -> None:
    value = written("0.9.0")
    inputs = value["profiles"]["b12x-full"]["inputs"]
    value["profiles"]["b12x-full"] = {"inputs": inputs, "not-served": "nothing to select"}
    record = read(value, Record)
    assert "- 0.9.0: not supported: nothing to select" in render([record], CATALOG)
    assert unmet(record, CATALOG.profile("b12x-full")) == {}


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (Outcome(selected="CutlassFP8ScaledMMLinearKernel"), "CutlassFP8"),
        (Outcome(selected="CutlassFp8BlockScaledMMKernel"), "CutlassFp8Block"),
        (Outcome(selected="MarlinNvFp4LinearKernel"), "MarlinNvFp4"),
        (Outcome(selected="NvFp4LinearBackend.MARLIN"), "MARLIN"),
        (Outcome(selected="FLASHINFER_B12X"), "FLASHINFER_B12X"),
        (Outcome(refused="ValueError: no"), "refused"),
        (Outcome(not_applicable="no such setting"), "n/a"),
    ],
)
def test_names_in_the_table(outcome: Outcome, shown: str) -> None:
    assert outcome.kernel == shown
    assert read(plain(outcome), Outcome) == outcome


def test_refusals_and_unavailable_choices_are_never_a_kernel() -> None:
    refused = Outcome.of(Answer(error=Failure("ValueError", "x" * 900)))
    assert (refused.selected, len(refused.refused)) == ("", 203)
    assert Outcome.of(Answer(not_applicable="why")) == Outcome(not_applicable="why")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"env": {"VLLM_X": "1"}}, "VLLM_X=1"),
        ({"linear_backend": "marlin"}, "--linear-backend marlin"),
        ({"moe_backend": "cutlass"}, "--moe-backend cutlass"),
        ({"model_type": "m"}, "a model of type m"),
        (
            {"linear_backend_per_quant": {"a": "b"}},
            """--kernel-config '{"linear_backend_per_quant": {"a": "b"}}'""",
        ),
    ],
)
def test_a_choice_as_a_user_would_write_it(request_: dict[str, Any], words: str) -> None:
    assert setting({"kind": "x", **request_}) == words


# ------------------------------------------------------------------------------------------ matrix

CHECK = Check(level="dispatch", name="nvfp4-moe", status="pass", expected="e", seen="Using 'B12X'")
ROW = MatrixRow(
    vllm="0.9.0",
    states={"fix": "needed"},
    reasons={"fix": ""},
    served=True,
    dispatch=(CHECK,),
    choices={"nvfp4-moe": {"": Outcome(refused="ValueError: no")}},
)


def test_a_row_of_the_matrix_has_only_the_requested_parts() -> None:
    bare = MatrixRow(vllm="0.9.0", states={}, reasons={}, served=False)
    document = validated("matrix", plain(Matrix(layers=("fix",), rows=(ROW, bare))))
    assert document["rows"][1] == {"vllm": "0.9.0", "states": {}, "reasons": {}, "served": False}


@pytest.mark.parametrize(
    "change",
    [
        {"states": {"fix": "done"}},
        {"served": None},
        {"dispatch": [{"level": "dispatch"}]},
        {"choices": {"nvfp4-moe": {"": {}}}},
        {"choices": {"nvfp4-moe": {"": {"selected": "A", "refused": "B"}}}},
        {"choices": {"nvfp4-moe": {"": {"selected": ""}}}},
        {"colour": "green"},
    ],
    ids=str,
)
def test_a_broken_row_of_the_matrix_is_refused(change: dict[str, Any]) -> None:
    document = plain(Matrix(layers=("fix",), rows=(ROW,)))
    document["rows"][0] |= change
    assert not validator("matrix").is_valid(document)
