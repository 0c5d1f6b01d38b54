"""The base types of every JSON document: typed values that are also their schemas.

A document is a frozen `msgspec.Struct`.  `plain` converts it to JSON, `read` parses JSON, and
`json_schema` returns its JSON Schema (draft 2020-12), so that none of the three is written by hand.

A field without a default is always printed.  One with a default is omitted if it has that
value, unless the default is made with `always`.  So ``X | None`` prints null, and
``X | None = None`` never does.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import NODEFAULT, Meta

from builder.applier.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = "#/$defs/{name}"

# In Python ``$`` also matches before a final newline, in JSON Schema not. ``$(?!\n)`` is the
# end of the string in both.
Text = Annotated[str, Meta(min_length=1)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)")]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
#: A timestamp in UTC, to the second.
Moment = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$(?!\n)")]


def moment(seconds: float) -> Moment:
    """Seconds since 1970 as a timestamp."""
    whole = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%SZ")


def always(value: Any) -> Any:
    """A default that is also printed."""
    return msgspec.field(default_factory=lambda: value)


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a document."""

    #: JSON Schema keywords to add to this part's schema, for rules that types cannot express.
    schema_rules: ClassVar[dict[str, Any]] = {}


class Problem(Part, frozen=True, kw_only=True):
    """Why a command failed."""

    code: Annotated[int, Meta(ge=1, description="the exit status")]
    message: Text
    hint: Annotated[str, Meta(description="the next command to try; may be empty")]


class Document(Part, frozen=True, kw_only=True):
    """A whole document; an incompatible change increases its ``schema``."""

    schema: Literal[1] = always(1)
    #: results so far, printed with the error that ended the command
    error: Problem | None = None


class Failed(Part, frozen=True, kw_only=True):
    """The document of a command that failed without a result."""

    schema: Literal[1]
    error: Problem


def plain(value: Part) -> dict[str, Any]:
    """A document or part as JSON dictionaries and lists."""
    members: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return members


def read(value: object, form: type[T]) -> T:
    """Convert JSON, or an object with attributes, to a typed value; unknown fields are dropped.

    Raises:
        ValueError: it does not match; the message says where.
    """
    return msgspec.convert(value, form, from_attributes=True)


#: Dots after a name in one line of TOML: a key of so many parts takes tomllib quadratic time.
_DOTS = 200
_DOT = re.compile(r"[\w\"'-][ \t]*+\.")
#: Bytes of a TOML file that is read; the largest layer has 60 kB.
_TOML_BYTES = 4 << 20


def load_toml(path: Path) -> dict[str, Any]:
    """A TOML file, which may come from other people.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no TOML, no regular file, too large, or has a key of too many parts.
    """
    text = read_regular(path, _TOML_BYTES).decode("utf-8").replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _DOTS and len(_DOT.findall(line)) > _DOTS:
            raise ValueError(f"line {number} has more than {_DOTS} dots")
    try:
        table = tomllib.loads(text)
        _refuse_large_numbers(table)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return table


def _refuse_large_numbers(value: object) -> None:
    """Refuse numbers that TOML does not have; one of 5,000 digits could not even be printed."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number has more than 64 bits")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _refuse_large_numbers(item)


def json_schema(name: str, title: str, *forms: type[Part]) -> dict[str, Any]:
    """The self-contained JSON Schema of a document with one of these forms.

    Raises:
        ValueError: two parts of the document have the same name.
    """
    forms = tuple(dict.fromkeys((*forms, Failed)))
    outer, parts = msgspec.json.schema_components(forms, ref_template=_REFERENCE)
    for struct in _structs(forms):
        if struct.cls.__name__ not in parts:
            raise ValueError(f"document {name}: two parts are called {struct.cls.__name__}")
        _as_printed(parts[struct.cls.__name__], struct)
    (version,) = parts[forms[0].__name__]["properties"]["schema"]["enum"]
    head = {
        "$schema": _DIALECT,
        "$id": f"urn:spark-build:schema:{name}:{version}",
        "title": title,
    }
    return {**head, "anyOf": list(outer), "$defs": dict(sorted(parts.items()))}


def _structs(forms: Sequence[type[Part]]) -> Iterator[msgspec.inspect.StructType]:
    """Each struct in these forms, once."""
    pending: list[object] = [*msgspec.inspect.multi_type_info(forms)]
    seen: set[type] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, (tuple, list)):
            pending += item
        elif isinstance(item, msgspec.inspect.Field):
            pending.append(item.type)
        elif isinstance(item, msgspec.inspect.StructType):
            if item.cls not in seen:
                seen.add(item.cls)
                yield item
                pending += item.fields
        elif isinstance(item, msgspec.inspect.Type):
            pending += (getattr(item, name) for name in item.__struct_fields__)


def _as_printed(schema: dict[str, Any], struct: msgspec.inspect.StructType) -> None:
    """Change a schema of input into the schema of output."""
    schema["additionalProperties"] = False
    schema["required"] = []
    for field in struct.fields:
        form = schema["properties"][field.encode_name]
        form.pop("default", None)
        if field.required or field.default_factory not in (NODEFAULT, list, dict, set):
            schema["required"].append(field.encode_name)
        elif field.default is None:
            form["anyOf"] = [part for part in form["anyOf"] if part != {"type": "null"}]
    schema |= struct.cls.schema_rules  # type: ignore[attr-defined]
