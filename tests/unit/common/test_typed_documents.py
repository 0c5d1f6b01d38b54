"""A document is its own schema: what is printed, what is left out, and what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import jsonschema
import pytest

from builder.common.document import (
    Count,
    Digest,
    Document,
    Moment,
    Part,
    Sha256,
    Text,
    always,
    json_schema,
    plain,
    read,
)
from builder.common.plan import Commit, Day


class Row(Part, frozen=True, kw_only=True):
    """A row."""

    schema_rules: ClassVar[dict[str, Any]] = {"minProperties": 3}

    name: Text
    last: Text | None
    note: Text | None = None
    tags: tuple[Text, ...] = ()
    where: str = always("")


class Table(Document, frozen=True, kw_only=True):
    """A table."""

    rows: tuple[Row, ...]
    total: Count


TABLE = Table(rows=(Row(name="a", last=None),), total=1)
PRINTED = {"schema": 1, "rows": [{"name": "a", "last": None, "where": ""}], "total": 1}


def test_defaults_are_omitted() -> None:
    assert plain(TABLE) == PRINTED
    assert plain(Row(name="a", last="b", note="c", tags=("d",))) == {
        "name": "a", "last": "b", "note": "c", "tags": ["d"], "where": "",
    }  # fmt: skip


def test_printed_documents_can_be_read() -> None:
    assert read(PRINTED, Table) == TABLE
    assert read({**PRINTED, "newer": True}, Table) == TABLE
    with pytest.raises(ValueError, match=r"at `\$\.rows\[0\]\.name`"):
        read({**PRINTED, "rows": [{"name": "", "last": None}]}, Table)


@pytest.mark.parametrize("form", [Sha256, Digest, Moment, Commit, Day])
def test_a_pattern_must_match_the_whole_text(form: Any) -> None:
    good = {
        Sha256: "0" * 64, Digest: "sha256:" + "0" * 64, Moment: "2026-11-22T00:00:00Z",
        Commit: "0" * 40, Day: "2026-11-22",
    }[form]  # fmt: skip
    assert read(good, form) == good
    with pytest.raises(ValueError, match="matching regex"):
        read(f"{good}\n", form)


def test_the_schema_accepts_printed_documents() -> None:
    value = json_schema("table", "A table", Table)
    assert value["$id"] == "urn:spark-build:schema:table:1"
    validator = jsonschema.Draft202012Validator(value)
    problem = {"code": 2, "message": "no", "hint": ""}
    for good in (PRINTED, {**PRINTED, "error": problem}, {"schema": 1, "error": problem}):
        validator.validate(good)


ROW = PRINTED["rows"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"total": -1},
        {"colour": "green"},
        {"error": None},
        {"error": {"code": 0, "message": "no", "hint": ""}},
        {"rows": [{**ROW, "note": None}]},
        {"rows": [{**ROW, "name": ""}]},
        {"rows": [{**ROW, "colour": "green"}]},
        {"rows": [{"name": "a", "last": None}]},
        {"rows": [{"name": "a", "where": "", "tags": []}]},
    ],
    ids=str,
)
def test_the_schema_refuses_anything_else(change: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(json_schema("table", "A table", Table))
    assert not validator.is_valid({**PRINTED, **change})


def test_two_parts_of_one_name_are_an_error() -> None:
    other = type("Row", (Part,), {"__annotations__": {"x": int}, "__module__": "tests.documents"})
    both = type(
        "Both",
        (Document,),
        {"__annotations__": {"a": Row, "b": other}, "__module__": __name__},
        kw_only=True,
        frozen=True,
    )
    with pytest.raises(ValueError, match="two parts are called Row"):
        json_schema("both", "Both", both)
