"""Evidence counts for one digest, and its checks decide, not what it says of itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.publishing.evidence import Claim, Evidence, parse_evidence, read_evidence

if TYPE_CHECKING:
    from pathlib import Path

DIGEST, CONFIG, PLAN = ("sha256:" + letter * 64 for letter in "abc")
CLAIM = Claim(digest=DIGEST, digests=(DIGEST, CONFIG), plan_digest=PLAN, expects=True)
LEVELS = ("static", "imports", "dispatch")


def row(level: str, status: str = "pass", **more: Any) -> dict[str, Any]:
    return {"level": level, "name": f"{level} one", "status": status, "reason": "why", **more}


GOOD = [row(level) for level in LEVELS]


def evidence(checks: Any = None, **changes: Any) -> Evidence:
    """Evidence that proves the claim, unless it is changed."""
    document = {
        "digests": [DIGEST],
        "plan_digest": PLAN,
        "passed": True,
        "checks": GOOD if checks is None else checks,
    }
    return Evidence(document={**document, **changes}, origin="file")


def test_sufficient_evidence() -> None:
    assert evidence().lacks(CLAIM, LEVELS) == []
    assert evidence(digests=[CONFIG]).lacks(CLAIM, LEVELS) == [], "a Docker Engine names the config"
    assert evidence(passed=False).lacks(CLAIM, LEVELS) == [], "the checks decide"
    assert evidence().levels() == list(LEVELS)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (evidence(digests=["sha256:" + "0" * 64]), "is about sha256:000"),
        (evidence(digests=[]), "no digest"),
        (evidence(plan_digest="sha256:other"), "about plan"),
        (evidence([]), "was not run"),
        (evidence([*GOOD, row("static", "fail", reason="touched")]), "failed: touched"),
        (evidence([*GOOD, row("codegen", "fail")]), "codegen codegen one failed"),
        (evidence([*GOOD, row("static", "PASS")]), "failed"),
        (evidence([*GOOD, {"level": "static"}]), "failed"),
        (evidence([*GOOD, row("static", "not-run")]), "was not run: why"),
        (evidence(GOOD[:2]), "level dispatch was not run"),
        (evidence([*GOOD[:2], row("dispatch", "not-run", moot=True)]), "was not run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_insufficient_evidence(made: Evidence, reason: str) -> None:
    assert any(reason in text for text in made.lacks(CLAIM, LEVELS)), made.lacks(CLAIM, LEVELS)


def test_a_level_with_nothing_to_check() -> None:
    settings = evidence([GOOD[0], row("imports", "not-run", moot=True), GOOD[2]])
    assert settings.lacks(CLAIM, LEVELS) == []
    assert settings.levels() == ["static", "dispatch"]
    silent = Claim(digest=DIGEST, digests=(DIGEST,), plan_digest=PLAN, expects=False)
    no_line = evidence([*GOOD[:2], row("dispatch", "not-run", moot=True)])
    assert no_line.lacks(silent, LEVELS) == []
    assert evidence([row("imports", "not-run", moot=True)]).lacks(silent, ("imports",))


def test_attached_evidence_has_no_local_path() -> None:
    verdict = {"todo": ["spark-build verify oci:/home/me/out"], "status": "not-proven"}
    made = evidence(target="oci:/home/me/out", verdict=verdict)
    document = json.loads(made.about(CLAIM))
    assert (document["target"], document["digests"]) == (DIGEST, [DIGEST])
    assert b"/home/me" not in made.about(CLAIM)


def test_both_commands_write_evidence() -> None:
    report = dict(evidence().document)
    for value in (report, {"schema": 1, "image": "x", "verify": report}, [report]):
        (found,) = parse_evidence(json.dumps(value).encode(), "file")
        assert found.lacks(CLAIM, LEVELS) == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"{}", b"1", b'{"checks": 1}', b'{"verify": []}', b'{"verify": null}',
        b'{"checks": {"not": "a list"}}', b'{"checks": [], "digests": null}',
        b"[" * 10_000 + b"]" * 10_000, b'{"checks": [], "x": ' + b"[" * 101 + b"]" * 101 + b"}",
        b'{"checks": [], "x": 1e999}', b'{"checks": [], "x": NaN}', b'{"checks": [], "x": \xff}',
        b'{"checks": [], "x": %s}' % (b"9" * 5000),
    ],
)  # fmt: skip
def test_malformed_evidence(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=r"evidence\.json"):
        read_evidence(file)


def test_a_malformed_check_is_named() -> None:
    text = json.dumps({**evidence().document, "checks": [*GOOD, "codegen failed"]})
    with pytest.raises(UsageError, match=r"Expected `object`, got `str` - at `\$\.checks\[3\]`"):
        parse_evidence(text.encode(), "file")
