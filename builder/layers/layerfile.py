"""Reads ``layer.toml`` into a rendered layer: validated, with every file inlined.

The rendered form is a JSON object, so that mods and images need no TOML, and its
canonical sha256 is the layer's identity.
"""

from __future__ import annotations

import ast
import base64
import datetime
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from builder.applier.diff import parse_diff
from builder.applier.files import DOCUMENT, read_regular
from builder.applier.layers import (
    Clause,
    CodePin,
    DonorPin,
    Env,
    Graft,
    Layer,
    Pins,
    Pull,
    Remove,
    Wheel,
    WheelPin,
)
from builder.applier.machinecode import CODE
from builder.applier.values import ApplyError, is_sha256, keys_of, normalize, path_problem
from builder.common.diffs import read_sections
from builder.common.document import load_toml, plain
from builder.common.plan import read_pin
from builder.errors import KINDS, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping


# ---------------------------------------------------------------- keys of layer.toml and pins.toml

#: key -> (type, required).  Unknown keys are errors, because a misspelt one would have no effect.
LAYER = {
    "summary": (str, True),
    "description": (str, False),
    "open-ended": (str, False),
    "order": (int, True),
    "after": (list, False),
    "series": (str, False),
    "package": (str, True),
    "provenance": (dict, True),
    "upstream": (list, False),
    "not-applicable": (list, False),
    "variant": (list, True),
}
#: DEP-3 fields; https://dep-team.pages.debian.net/deps/dep3/
PROVENANCE = {
    "origin": (str, True),
    "bug": (list, False),
    "forwarded": (str, True),
    "applied-upstream": (str, True),
    "last-update": (datetime.date, True),
}
UPSTREAM = {
    "when": (dict, True),
    "since": (str, True),
    "reason": (str, True),
    "probe": (list, True),
}
NOT_APPLICABLE = {"when": (dict, True), "reason": (str, True)}
VARIANT = {
    "name": (str, True),
    "when": (dict, True),
    "notes": (list, False),
    "serve-flags": (list, False),
    "moe-serve-flags": (list, False),
    "op": (list, False),
}
COMMON = {"op": (str, True), "if": (dict, False)}
OPS: dict[str, dict[str, tuple[type, bool]]] = {
    "replace": {
        "file": (str, True),
        "old": (str, False),
        "old-file": (str, False),
        "new": (str, False),
        "new-file": (str, False),
        "count": (int, False),
    },
    "diff": {"file": (str, True)},
    "graft": keys_of(Graft),
    "copy": {"from": (str, True), "to": (str, True)},
    "wheel": {**keys_of(Wheel), "wins-over": (list, False)},
    "remove": keys_of(Remove),
    "env": keys_of(Env),
    "hook": {"file": (str, True), "hook": (str, True)},
    "compile": {
        "source": (str, True),
        "change": (str, False),
        "file": (str, False),
        "arch": (str, True),
    },
    "pull": keys_of(Pull),
}


# --------------------------------------------------------------------------------------- the layer

Table = dict[str, Any]
#: Characters of a problem in a message.
_LONG = 500
#: Characters of a range of versions, and ops of a variant: each is judged on the ops before it.
_LONGEST_RANGE, _MOST_OPS = 500, 1000


def _is_a(value: object, kind: type) -> bool:
    """Like ``isinstance``, but a bool is not an int and a datetime is not a date."""
    if isinstance(value, (bool, datetime.datetime)):
        return type(value) is kind
    return isinstance(value, kind)


class _Reader:
    """Validates one layer folder; every error names the file and the position."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: the pinned sha256 of a wheel's RECORD by file name, "" if it is not pinned
        self.records: dict[str, str] = {}

    def fail(self, where: str, problem: str, file: str = "layer.toml") -> UsageError:
        if len(problem) > _LONG:
            problem = f"{problem[:_LONG]}..."
        return UsageError(
            f"{self.folder.name}/{file}: {where}: {problem}"
            if where
            else f"{self.folder.name}/{file}: {problem}",
            hint=f"spark-build layers check {self.folder.name}",
        )

    def toml(self, name: str) -> Table:
        try:
            return load_toml(self.folder / name)
        except ValueError as error:
            raise self.fail("", f"not valid TOML: {error}", name) from None

    def table(
        self, value: object, schema: Mapping[str, tuple[type, bool]], where: str, file: str
    ) -> Table:
        if not isinstance(value, dict):
            raise self.fail(where, "should be a table", file)
        for key in value:
            if key not in schema:
                guess = did_you_mean(key, schema)
                raise self.fail(where, f"unknown key {key!r}{guess}", file)
        for key, (kind, required) in schema.items():
            if key not in value:
                if required:
                    raise self.fail(where, f"key {key!r} is missing", file)
            elif not _is_a(value[key], kind):
                raise self.fail(where, f"{key!r} should be {KINDS[kind]}", file)
        return value

    def text(self, name: str) -> str:
        try:
            return self.data(name).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("", f"file {name!r} is not UTF-8 text") from None

    def data(self, name: str) -> bytes:
        try:
            path = Path(os.path.realpath(self.folder / name))
            if not path.is_relative_to(os.path.realpath(self.folder)):
                raise self.fail("", f"{name!r} is outside the layer's folder")
            if not path.is_file():
                raise self.fail("", f"file {name!r} does not exist")
            return read_regular(path, DOCUMENT)
        except (OSError, ValueError) as error:  # too long, or with a zero byte
            raise self.fail("", f"file {name!r:.100} cannot be read: {error}") from None

    def range(self, specifier: str, where: str) -> SpecifierSet:
        with suppress(InvalidSpecifier):
            if len(specifier) <= _LONGEST_RANGE:  # Python reads no number of 5000 digits
                return SpecifierSet(specifier)
        raise self.fail(where, f"{specifier!r:.100} is not a PEP 440 range")

    def when(self, value: Mapping[str, Any], where: str) -> dict[str, str]:
        for package, specifier in value.items():
            if not isinstance(specifier, str):
                raise self.fail(where, f"the range of {package!r:.100} should be a text in quotes")
            for spec in self.range(specifier, where):
                if spec.operator == ">" or (
                    spec.operator == "<" and not any(c in spec.version for c in ("a", "rc", "dev"))
                ):
                    raise self.fail(
                        where,
                        f"{package} {spec}: a bare bound treats pre-releases and local versions "
                        f"wrongly; write e.g. '<{spec.version}rc0' or '>={spec.version}'",
                    )
        return {normalize(package): str(spec) for package, spec in value.items()}

    def op(self, value: object, where: str) -> Table:
        if not isinstance(value, dict) or "op" not in value:
            raise self.fail(where, "key 'op' is missing")
        kind = value["op"]
        if not isinstance(kind, str) or kind not in OPS:
            raise self.fail(where, f"unknown op {kind!r}{did_you_mean(str(kind), OPS)}")
        op = dict(self.table(value, {**COMMON, **OPS[kind]}, f"{where} ({kind})", "layer.toml"))
        if "if" in op:
            op["if"] = self.when(op["if"], where)
        for key in ("file", "to", "reader"):
            if key in op:
                self.below(op[key], where, key)
        render = getattr(self, f"op_{kind}", None)
        return render(op, where) if render else op

    def below(self, path: str, where: str, key: str) -> None:
        problem = path_problem(path)
        if problem:
            raise self.fail(where, f"{key} {path!r:.100} is not below site-packages: it {problem}")

    def op_replace(self, op: Table, where: str) -> Table:
        for side in ("old", "new"):
            source = op.pop(f"{side}-file", None)
            if (source is None) == (side not in op):
                raise self.fail(where, f"give either {side!r} or '{side}-file'")
            if source is not None:
                op[side] = self.text(source)
            if not op[side]:
                raise self.fail(where, f"{side!r} is empty, so its state cannot be determined")
        if op.setdefault("count", 1) < 1:
            raise self.fail(where, "'count' is less than 1: it would change nothing")
        if op["old"] == op["new"]:
            raise self.fail(where, "'old' and 'new' are the same text")
        return op

    def op_diff(self, op: Table, where: str) -> Table:
        op["diff"] = self.text(op["file"])
        try:
            files = parse_diff(op["diff"])
        except ApplyError as error:
            raise self.fail(where, f"{op['file']}: {error}") from None
        for change in files:
            for path in filter(None, (change.old, change.new)):
                self.below(path, where, op["file"])
            whole = change.old is None or change.new is None  # its text is all there is
            if not whole and any(hunk.context < 3 for hunk in change.hunks):
                raise self.fail(where, f"{change.path}: a hunk has less than 3 lines of context")
        return op

    def op_graft(self, op: Table, where: str) -> Table:
        if bool(op.get("names")) == bool(op.get("whole")):
            raise self.fail(where, "give either 'names' or 'whole = true'")
        if "==" not in op["from"]:
            raise self.fail(where, f"'from' {op['from']!r} is not DISTRIBUTION==VERSION")
        return op

    def op_copy(self, op: Table, where: str) -> Table:
        del where
        op["data"] = base64.b64encode(self.data(op["from"])).decode()
        return op

    def op_wheel(self, op: Table, where: str) -> Table:
        if ("version" in op) == ("version-of" in op):
            raise self.fail(where, "give either 'version' or 'version-of'")
        return op

    def op_remove(self, op: Table, where: str) -> Table:
        if "unless" in op:
            self.range(op["unless"], where)
        return op

    def op_env(self, op: Table, where: str) -> Table:
        if not op["name"].startswith("VLLM_") and "reader" not in op:
            raise self.fail(where, f"{op['name']} needs a 'reader': the file that reads it")
        return op

    def op_hook(self, op: Table, where: str) -> Table:
        name, _, function = op.pop("hook").partition(":")
        if not function:
            raise self.fail(where, "'hook' is not FILE.py:FUNCTION")
        op["source"], op["function"] = self.text(name), function
        try:
            body = ast.parse(op["source"]).body
        except SyntaxError as error:
            raise self.fail(where, f"hook {name} is not Python: {error}") from None
        if not any(isinstance(n, ast.FunctionDef) and n.name == function for n in body):
            raise self.fail(where, f"hook {name} does not define {function}")
        return op

    def op_compile(self, op: Table, where: str) -> Table:
        # these need what the package index needs
        from builder.compile.changes import rendered_change
        from builder.compile.sources import gencode_flags

        if ("change" in op) == ("file" in op):
            raise self.fail(where, "give either 'change' or 'file'")
        if op["source"] != "vllm":
            raise self.fail(where, f"source {op['source']!r}: only vllm's sources are compiled")
        try:
            gencode_flags(op["arch"])
            if "change" in op:
                return {**op, **rendered_change(op["change"])}
            text = self.text(op["file"])
            paths = [section.path for section in read_sections(text.encode())]
        except UsageError as error:
            raise self.fail(where, str(error)) from None
        reason = f"{', '.join(paths)} reach vllm compiled"
        return {**op, "diff": text, "files": paths, "reason": reason, "name": self.folder.name}

    def op_pull(self, op: Table, where: str) -> Table:
        from builder.common.forge import parse_pull

        op["pull"] = str(parse_pull(op["pull"]))
        for key in ("include", "exclude"):
            for pattern in op.get(key, ()):
                if not isinstance(pattern, str) or path_problem(pattern):
                    raise self.fail(where, f"{key!r} should be a list of patterns of paths")
        for folder, becomes in op.get("map", {}).items():
            if not (isinstance(becomes, str) and folder.endswith("/") and becomes.endswith("/")):
                raise self.fail(where, "'map' should map folders to folders, both with '/'")
            self.below(becomes[:-1], where, "map")
        return op

    def variant(self, value: object, where: str) -> Table:
        variant = self.table(value, VARIANT, where, "layer.toml")
        if len(variant.get("op", ())) > _MOST_OPS:
            raise self.fail(where, f"has {len(variant['op'])} ops, and {_MOST_OPS} is the limit")
        ops = [self.op(op, f"{where} op {i}") for i, op in enumerate(variant.get("op", ()), 1)]
        if not ops and not variant.get("serve-flags") and not variant.get("moe-serve-flags"):
            raise self.fail(where, "has no op and no flags: it would do nothing")
        rendered = {key: item for key, item in variant.items() if key != "op"}
        return {**rendered, "when": self.when(variant["when"], where), "ops": ops}

    def upstream(self, value: object, where: str) -> Table:
        entry = self.table(value, UPSTREAM, where, "layer.toml")
        for clause in entry["probe"]:
            self.table(clause, keys_of(Clause), f"{where} probe", "layer.toml")
            if len(clause) != 2 or clause.get("missing") is False:
                raise self.fail(where, "a probe clause is 'file' and one test")
        if not entry["probe"]:
            raise self.fail(where, "the probe is empty: a version range alone is not enough")
        return {**entry, "when": self.when(entry["when"], where)}

    def pins(self) -> Table:
        name = "pins.toml"
        if not (self.folder / name).is_file():
            return {"wheel": [], "donor": []}
        raw = self.table(self.toml(name), keys_of(Pins), "", name)
        for kind, form in (("wheel", WheelPin), ("donor", DonorPin), ("code", CodePin)):
            for number, row in enumerate(raw.get(kind, ()), 1):
                self.table(row, keys_of(form), f"{kind} {number}", name)
        wheels = [dict(row) for row in raw.get("wheel", [])]
        for number, row in enumerate(wheels, 1):
            self.records[row["filename"]] = record = row.pop("record-sha256", "")
            if record and not is_sha256(record):
                raise self.fail(
                    f"wheel {number}", f"record-sha256 {record!r} is not a sha256", name
                )
        pins = {"wheel": wheels, "donor": raw.get("donor", [])}
        for row in raw.get("code", ()):
            if row["how"] not in CODE:
                raise self.fail("code", f"how {row['how']!r} is none of {', '.join(CODE)}", name)
        if "code" in raw:
            pins["code"] = raw["code"]
        if "pull" in raw:
            pins["pull"] = [self.pull_pin(row, name) for row in raw["pull"]]
        return pins

    def pull_pin(self, row: object, name: str) -> Table:
        if not isinstance(row, dict):
            raise self.fail("pull", "should be a table", name)
        values = {key.replace("-", "_"): value for key, value in row.items()}
        return plain(read_pin(values, f"{self.folder.name}/{name}: pull"))


def load_layer(folder: Path) -> Layer:
    """Read and validate one layer folder into its rendered form.

    Raises:
        UsageError: a file is missing or malformed, or a key is unknown.
    """
    reader = _Reader(folder)
    raw = reader.table(reader.toml("layer.toml"), LAYER, "", "layer.toml")
    provenance = dict(reader.table(raw["provenance"], PROVENANCE, "provenance", "layer.toml"))
    provenance["last-update"] = provenance["last-update"].isoformat()
    not_applicable = []
    for number, entry in enumerate(raw.get("not-applicable", ()), 1):
        where = f"not-applicable {number}"
        entry = reader.table(entry, NOT_APPLICABLE, where, "layer.toml")
        not_applicable.append({**entry, "when": reader.when(entry["when"], where)})
    rendered: Table = {
        "name": folder.name,
        "summary": raw["summary"],
        "order": raw["order"],
        "after": raw.get("after", []),
        **({"series": raw["series"]} if "series" in raw else {}),
        "package": normalize(raw["package"]),
        "provenance": provenance,
        "upstream": [
            reader.upstream(e, f"upstream {i}") for i, e in enumerate(raw.get("upstream", ()), 1)
        ],
        "not-applicable": not_applicable,
        "variants": [reader.variant(v, f"variant {i}") for i, v in enumerate(raw["variant"], 1)],
        "pins": reader.pins(),
    }
    try:
        layer = Layer.read(rendered)
    except ApplyError as error:
        raise reader.fail("", str(error)) from None
    # outside the rendered form, which the layer's digest is of: a wheel's sha256 covers its RECORD
    wheels = [replace(pin, record_sha256=reader.records[pin.filename]) for pin in layer.pins.wheel]
    return replace(layer, pins=replace(layer.pins, wheel=wheels)) if wheels else layer


def description(folder: Path) -> str:
    """The layer's own long description (not part of its identity)."""
    return _beside(folder, "description")


def open_ended(folder: Path) -> str:
    """Why a range of the layer has no end (not part of its identity); empty if it must have one."""
    return _beside(folder, "open-ended")


def _beside(folder: Path, key: str) -> str:
    text: str = load_toml(folder / "layer.toml").get(key, "")
    return text.strip()
