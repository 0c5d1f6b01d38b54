"""The published schemas: complete, valid in themselves, true of real documents, and strict."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import check_jsonschema
import jsonschema
import pytest
import typer.main

from builder.__main__ import run
from builder.cli.documents import names, schema
from builder.cli.root import whole
from builder.common.document import plain
from builder.diagnose.report import Diagnosed
from builder.diagnose.verdict import diagnose
from builder.errors import UsageError
from builder.layers.catalog import Catalog
from builder.proof.checks import LEVELS, Check, Necessity
from builder.proof.report import Report
from tests.documents import document_of, validated, validator
from tests.unit.fakes import BACKEND, env_op, fake_base, make_layer, make_plan_of, vllm_files
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOGS = Path(__file__).parents[1] / "logs"
DIGEST = f"sha256:{'0' * 64}"


def json_commands() -> Iterator[list[str]]:
    """Every command that has ``--json``."""
    pending: list[tuple[list[str], Any]] = [([], typer.main.get_command(whole()))]
    while pending:
        words, command = pending.pop()
        if any("--json" in getattr(option, "opts", ()) for option in command.params):
            yield words
        pending += [([*words, n], c) for n, c in getattr(command, "commands", {}).items()]


def test_every_command_with_json_has_a_schema() -> None:
    commands = list(json_commands())
    assert [document_of(words) for words in commands] == ["-".join(words) for words in commands]
    assert len(commands) > 30


#: Documents whose form has changed since their first.
VERSIONS = {"plan": 2, "apply": 2, "config-show": 2}


@cache
def check_part(text: str) -> None:
    """Check a schema, or what one has in common with others; each once."""
    jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_a_wrong_part_of_a_schema_is_refused() -> None:
    with pytest.raises(jsonschema.SchemaError):
        check_part('{"type": "objekt"}')


@pytest.mark.parametrize("name", names())
def test_each_schema_is_self_contained(name: str) -> None:
    value = schema(name)
    for part in ({**value, "$defs": {}}, *value["$defs"].values()):
        check_part(json.dumps(part))
    assert value["$id"] == f"urn:spark-build:schema:{name}:{VERSIONS.get(name, 1)}"
    for reference in references(value):
        assert reference.removeprefix("#/$defs/") in value["$defs"]
    assert set(value["$defs"]) == {r.removeprefix("#/$defs/") for r in references(value)}


def references(value: Any) -> set[str]:
    """Everything that a schema refers to."""
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*(references(part) for part in value.values()))
    return set().union(*(references(part) for part in value)) if isinstance(value, list) else set()


def test_levels_of_the_schema_match_the_program() -> None:
    known = schema("verify")["$defs"]["Check"]["properties"]["level"]["enum"]
    assert set(LEVELS) == set(known)


def test_the_command_prints_a_valid_schema(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(["schema", "verify"]) == 0
    (tmp_path / "verify.json").write_text(capsys.readouterr().out)
    (tmp_path / "good.json").write_text(json.dumps(plain(report().document())))
    (tmp_path / "bad.json").write_text(json.dumps({**plain(report().document()), "passed": "yes"}))
    files = [str(tmp_path / name) for name in ("verify.json", "good.json", "bad.json")]
    monkeypatch.setattr(sys, "argv", ["check-jsonschema", "--schemafile", *files])
    with pytest.raises(SystemExit) as ended:
        check_jsonschema.main()
    out = capsys.readouterr().out
    assert ended.value.code == 1, out
    assert "bad.json" in out
    assert "$.passed: 'yes' is not of type 'boolean'" in out
    assert "good.json" not in out


def test_the_command_lists_every_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert capsys.readouterr().out.split() == names()
    assert run(["schema", "--json"]) == 0
    value = validated("schema", json.loads(capsys.readouterr().out))
    assert value["names"] == names()
    assert run(["schema", "verfy"]) == 2
    assert "did you mean 'verify'?" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no schema 'plans'; did you mean 'plan'"):
        schema("plans")


# --------------------------------------------------------------------------------- true documents


def report() -> Report:
    """Evidence with one of everything."""
    check = Check(level="codegen", name="k", status="fail", expected="e", seen="s", where="w")
    passed = Check(
        level="dispatch",
        name="line",
        status="pass",
        expected="e",
        seen="e",
        simulated=("the device",),
        figures={"OMMA.SF": 128, "tokens a second": 17.5},
    )
    skipped = Check(level="serve", name="x", status="not-run", expected="e", seen="", reason="no")
    verdicts = [
        Necessity.by("a", "needed", check, [passed]),
        Necessity(layer="b", state="upstream", necessary=False, reason="it changes nothing"),
        Necessity(layer="c", state="applied", necessary="unknown", reason="not asked"),
    ]
    return Report(target="t", plan=planned(), checks=[check, passed, skipped], necessity=verdicts)


def plan() -> dict[str, Any]:
    """A plan with a file, a variable and an idle layer."""
    layers = (make_layer("fix", BACKEND, env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")),)
    return make_plan_of(
        fake_base(vllm_files()), *layers, make_layer("idle", package="sglang")
    ).as_json()


@pytest.mark.parametrize(("row", "changes"), [(0, {"check": ""}), (1, {"check": "static x"})])
def test_a_necessary_layer_names_its_check_and_no_other_does(
    row: int, changes: dict[str, str]
) -> None:
    document = plain(report().document())
    validated("verify", document)
    document["necessity"][row] |= changes
    with pytest.raises(AssertionError):
        validated("verify", document)


@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_every_diagnosis_matches_its_schema(log: Path) -> None:
    with log.open("rb") as stream:
        validated("diagnose", plain(Diagnosed.of([diagnose(stream)])))


def test_every_layer_and_profile_matches_its_schema(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [["layers", "show", name] for name in Catalog.discover().names]
    for line in (*words, ["layers", "list"], ["layers", "check"], ["config", "show"]):
        assert run([*line, "--json"]) == 0
        validated(document_of(line), json.loads(capsys.readouterr().out))


def test_errors_match_every_schema() -> None:
    failed = {"schema": 1, "error": {"code": 2, "message": "no", "hint": ""}}
    for name in names():
        validated(name, failed)
    validated("verify", {**plain(report().document()), "error": failed["error"]})
    validated("plan", {**plan(), "error": failed["error"]})


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("image", "image-index"),
        ("compile-run", "compile-show"),
        ("compile-wheel", "compile-wheel-plan"),
    ],
)
def test_the_schema_of_a_command_accepts_everything_it_prints(name: str, other: str) -> None:
    assert document_of([*name.split("-"), "--dry-run", "--json"]) == name
    whole, instead = schema(name), schema(other)
    assert {form["$ref"] for form in instead["anyOf"]} < {form["$ref"] for form in whole["anyOf"]}
    assert instead["$defs"].items() <= whole["$defs"].items()


def test_image_without_a_build_matches_its_schema() -> None:
    validated("image", plan())
    validated("image", {"schema": 1, "plan_digest": DIGEST, "dockerfile": "FROM scratch\n"})
    assert not validator("image").is_valid({**plan(), "colour": "green"})
    assert not validator("image").is_valid({**plan(), "image": "oci:out"}), "half of what was built"


def built(**more: Any) -> dict[str, Any]:
    """What ``image --json`` prints of an image, besides its evidence."""
    run = {"before": [], "command": "docker run x", "serve": "vllm serve", "moe_flags": []}
    return {
        "schema": 1,
        "plan_digest": DIGEST,
        "image": "oci:out",
        "digest": DIGEST,
        "engine": "oci",
        "added_bytes": 1,
        "timings": {"plan": 0.1},
        "run": {**run, "env": {}},
        "layers": [{"name": "fix", "state": "needed", "cached": False}],
        **more,
    }


UNVERIFIED = {"passed": False, "checks": [], "not_run": 1}


def test_an_image_with_and_without_evidence_matches_its_schema() -> None:
    validated("image", built(verify=UNVERIFIED))
    validated("image", built(verify=UNVERIFIED, overlay=True))
    validated("image", built(verify=plain(report().document())))


@pytest.mark.parametrize(
    "change",
    [
        {"verify": {**UNVERIFIED, "passed": True}},
        {"verify": {**UNVERIFIED, "checks": [{}]}},
        {"verify": {"passed": True, "checks": [], "verdicts": {}}},
        {"verify": None},
        {"overlay": False},
        {"layers": [{"name": "fix", "state": "done"}]},
        {"run": {}},
        {"timings": {"plan": -1}},
        {"plans": []},
    ],
    ids=str,
)
def test_a_broken_image_is_refused(change: dict[str, Any]) -> None:
    assert not validator("image").is_valid(built(**{"verify": UNVERIFIED, **change}))


def test_an_index_names_the_platform_of_each_layer_and_plan() -> None:
    row = {"name": "fix", "state": "needed", "platform": "linux/arm64"}
    verify = {"passed": False, "checks": [], "verdicts": {}}
    index = built(plans=[plan()], layers=[row], verify=verify)
    for name in ("image", "image-index"):
        validated(name, index)
        validated(name, {key: index[key] for key in ("schema", "plan_digest", "plans", "timings")})
        for broken in (
            {**index, "plans": []},
            {**index, "layers": [{"name": "fix", "state": "needed"}]},
            {key: value for key, value in index.items() if key != "digest"},
        ):
            assert not validator(name).is_valid(broken)


# ------------------------------------------------------------------------------ broken documents


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Set a part of a document."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    """Take a part of a document away."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


BROKEN_REPORTS = {
    "no plan digest": drop("plan_digest"),
    "another schema": put("schema", value=2),
    "a word for a verdict": put("passed", value="yes"),
    "an unknown status": put("checks", 0, "status", value="skipped"),
    "an unknown level": put("checks", 0, "level", value="hunch"),
    "a check without evidence": drop("checks", 0, "seen"),
    "not run without a reason": put("checks", 2, "reason", value=""),
    "a figure that is not a number": put("checks", 1, "figures", "OMMA.SF", value="128"),
    "an extra key": put("checks", 0, "colour", value="green"),
    "an extra key at the top": put("colour", value="green"),
    "an unknown verdict": put("necessity", 0, "necessary", value="maybe"),
    "necessary without a check": put("necessity", 0, "check", value=""),
    "not necessary, but a check": put("necessity", 1, "check", value="k"),
    "unknown without a reason": put("necessity", 2, "reason", value=""),
    "an unknown state": put("necessity", 0, "state", value="done"),
    "an error without a code": put("error", value={"message": "no", "hint": ""}),
    "success as an error": put("error", value={"code": 0, "message": "no", "hint": ""}),
}
BROKEN_PLANS = {
    "a short digest": put("plan_digest", value="sha256:0"),
    "an unknown state": put("layers", 0, "state", value="done"),
    "no reason": put("layers", 0, "reason", value=""),
    "an absolute path": put("layers", 0, "files", 0, "path", value="/vllm/core.py"),
    "no digest of a file": put("layers", 0, "files", 0, "after", value="x"),
    "a number as a variable": put("env", "A", value=1),
    "no base": drop("base"),
    "no site-packages": drop("base", "site_packages"),
    "another platform": put("base", "platform", value="windows/amd64"),
}


@pytest.mark.parametrize("change", BROKEN_REPORTS.values(), ids=BROKEN_REPORTS.keys())
def test_broken_evidence_is_refused(change: Callable[[Any], None]) -> None:
    document = copy.deepcopy(plain(report().document()))
    validated("verify", document)
    change(document)
    assert not validator("verify").is_valid(document)


@pytest.mark.parametrize("change", BROKEN_PLANS.values(), ids=BROKEN_PLANS.keys())
def test_a_broken_plan_is_refused(change: Callable[[Any], None]) -> None:
    document = copy.deepcopy(plan())
    validated("plan", document)
    change(document)
    assert not validator("plan").is_valid(document)


def test_an_empty_document_is_refused() -> None:
    documents: tuple[object, ...] = ({}, [], None, {"schema": 1})
    for name in names():
        for document in documents:
            assert not validator(name).is_valid(document), (name, document)
