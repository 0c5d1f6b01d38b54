"""What ``vllm serve`` of one release accepts: flags, environment variables, parser names.

Everything is read from the release's source; nothing is imported or run.  vLLM builds its parser
from the fields of configuration classes: ``get_kwargs(ModelConfig)`` gives what each field takes,
and ``add_argument("--flag", **kwargs["field"])`` gives it a name.  The same statements are followed
here.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from builder.applier.edits import read_envs
from builder.common.console import console
from builder.common.document import Part, Sha256, Text
from builder.common.hints import shortened
from builder.common.paths import package_file
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.common.results import Results
from builder.errors import UsageError, did_you_mean
from builder.images.bases.imagetree import preload
from builder.images.bases.pypi import identify_pypi
from builder.images.subject import BaseRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from builder.applier.trees import Tree
    from builder.images.subject import Subject

    ReadFile = Callable[[str], bytes | None]


#: The kind of a value, if known.  A size is a whole number that may end in k, M, G, T;
#: an object is JSON with the fields of a configuration class.
Kind = Literal[
    "text", "integer", "size", "size-or-auto", "number", "json", "object", "true-or-false"
]

#: 4k is 4000, 4K is 4096 and takes no fraction (``human_readable_int`` in vLLM's argument parser).
_SIZE = re.compile(r"\d+(?:\.\d+)?[kmgt]|\d+[KMGT]")
#: Such a number in JSON, for the values of a configuration class.
_SIZE_IN_JSON = re.compile(r"(?<=[:,\[\s])\d+(?:\.\d+)?[kKmMgGtT]\b")
#: Words that ``optional_type`` reads as no value.
NONE = ("", "None")


class Key(Part, frozen=True, kw_only=True):
    """A field of a configuration class, as a key in JSON."""

    name: Text
    #: the only valid values, if the class checks them
    choices: tuple[str, ...] = ()
    #: keys of a nested configuration class
    keys: tuple[Key, ...] = ()


def in_json(value: str) -> Any:
    """A value as vLLM reads it in JSON: sizes are numbers, and other words are texts."""
    try:
        return json.loads(_SIZE_IN_JSON.sub("0", value))
    except (ValueError, RecursionError):
        return value


def wrong_key(keys: Sequence[Key], value: object, path: str = "") -> str:
    """Why a configuration class would refuse an object; empty if it accepts it."""
    known = {key.name: key for key in keys}
    for name, inner in value.items() if isinstance(value, dict) and keys else ():
        if name not in known:
            return f"has no key {path}{shortened(name)}{did_you_mean(name, known)}"
        if why := wrong_key(known[name].keys, inner, f"{path}{name}."):
            return why
        choices = {_folded(choice): choice for choice in known[name].choices}
        is_word = isinstance(inner, (str, int)) and not isinstance(inner, bool)
        if choices and is_word and _folded(str(inner)) not in choices:
            guess = did_you_mean(str(inner), choices.values())
            listed = ", ".join(choices.values())
            return (
                f"has no value {shortened(repr(inner))} for {path}{name}{guess} (it has {listed})"
            )
    return ""


def _folded(value: str) -> str:
    """Fold case and hyphens as some classes do; no class has two values that differ in those."""
    return value.lower().replace("-", "_")


def wrong_kind(kind: Kind, value: str, *, nullable: bool) -> str:
    """What the parser expects instead of this word; empty if it accepts the word."""
    if kind not in _KINDS or (nullable and value in NONE):
        return ""
    wanted, check = _KINDS[kind]
    try:
        check(value)
    except (ValueError, RecursionError):
        return wanted
    return ""


def _size(value: str) -> None:
    if not _SIZE.fullmatch(value.strip()):
        int(value)


def _size_or_auto(value: str) -> None:
    if value.strip().lower() != "auto":
        _size(value)


def _object(value: str) -> None:
    if not value.strip().startswith("{"):
        raise ValueError(value)
    json.loads(_SIZE_IN_JSON.sub("0", value))


_KINDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "integer": ("a whole number", int),
    "size": ("a whole number, or one like 4k", _size),
    "size-or-auto": ("a whole number, one like 4k, or auto", _size_or_auto),
    "number": ("a number", float),
    "json": ("JSON", json.loads),
    "object": ("a JSON object", _object),
}


#: The package whose names are followed.
PACKAGE = "vllm"


@dataclass(frozen=True)
class Imported:
    """A name that a module imports from another one."""

    module: str
    name: str


@dataclass(frozen=True)
class Module:
    """A parsed module, with the definition of each name."""

    name: str
    source: str
    names: dict[str, ast.stmt | Imported] = field(repr=False)
    #: imported for type checkers only
    types: dict[str, Imported] = field(repr=False)


@dataclass(frozen=True)
class Found:
    """Where a name is defined, and how."""

    module: Module
    node: ast.stmt

    @property
    def value(self) -> ast.expr | None:
        """The expression, if the name is a variable."""
        if isinstance(self.node, (ast.Assign, ast.AnnAssign)):
            return self.node.value
        return None


class Modules:
    """The modules of one release, each parsed once."""

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self._parsed: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None if the release does not have it."""
        if name not in self._parsed:
            self._parsed[name] = self._load(name)
        return self._parsed[name]

    def needed(self, name: str) -> Module:
        """A module that every release has.

        Raises:
            UsageError: this release does not have it.
        """
        found = self.module(name)
        if found is None:
            raise UsageError(
                f"this vLLM has no module {name}: its arguments cannot be read",
                hint="name a released vLLM: --release 0.33.0",
            )
        return found

    def _load(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file, package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            data = self._read(file)
            if data is None:
                continue
            source = data.decode("utf-8", "replace")
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError) as error:
                raise UsageError(f"{file} of this vLLM is not Python: {error}") from None
            parent = name if package else name.rpartition(".")[0]
            names, types = dict(_names(tree.body, parent)), dict(_types(tree.body, parent))
            return Module(name, source, names, types)
        return None

    def find(self, module: Module, name: str) -> Found | None:
        """The definition of a name, as seen from a module."""
        for _ in range(10):
            node = module.names.get(name) or self._behind_a_star(module, name)
            if isinstance(node, ast.stmt):
                return Found(module, node)
            if node is None or node.module.split(".")[0] != PACKAGE:
                return None
            target = self.module(node.module)
            if target is None:
                return None
            module, name = target, node.name
        return None

    def find_type(self, module: Module, name: str) -> Found | None:
        """The same as a type checker sees it, with imports for type checkers."""
        only = module.types.get(name)
        target = self.module(only.module) if only and only.module.startswith(PACKAGE) else None
        return self.find(target, only.name) if only and target else self.find(module, name)

    def _behind_a_star(self, module: Module, name: str) -> Imported | None:
        """The module that ``from .types import *`` imports a name from."""
        for node in module.names.values():
            if isinstance(node, Imported) and node.name == "*":
                other = self.module(node.module)
                if other is not None and name in other.names:
                    return Imported(node.module, name)
        return None

    def bases(self, found: Found) -> Iterator[Found]:
        """A class and its base classes in vLLM, the most derived first."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            if isinstance(base, ast.Name):
                lower = self.find(found.module, base.id)
                if lower is not None and isinstance(lower.node, ast.ClassDef):
                    yield from self.bases(lower)
        yield found


def _names(body: Sequence[ast.stmt], parent: str) -> Iterator[tuple[str, ast.stmt | Imported]]:
    """The names that a module's statements bind, without those for type checkers only."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from _imported(node, parent)
        elif isinstance(node, ast.Assign):
            yield from ((t.id, node) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.If):
            if not _is_checking(node):
                yield from _names(node.body, parent)
            yield from _names(node.orelse, parent)
        elif isinstance(node, ast.Try):
            yield from _names(node.body, parent)


def _types(body: Sequence[ast.stmt], parent: str) -> Iterator[tuple[str, Imported]]:
    """The names that are imported for type checkers only."""
    for node in body:
        if isinstance(node, ast.If) and _is_checking(node):
            for inner in node.body:
                if isinstance(inner, ast.ImportFrom):
                    yield from _imported(inner, parent)


def _is_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.dump(node.test)


def _imported(node: ast.ImportFrom, parent: str) -> Iterable[tuple[str, Imported]]:
    where = node.module or ""
    if node.level:
        above = parent.split(".")[: len(parent.split(".")) - node.level + 1]
        where = ".".join([*above, *([where] if where else [])])
    for alias in node.names:
        key = f"* of {where}" if alias.name == "*" else alias.asname or alias.name
        yield key, Imported(where, alias.name)


#: How many words follow a flag: none, one, one or none, one or more, or a fixed number.
Takes = Literal["nothing", "one", "optional", "many"] | int


_WRAPPERS = ("Annotated", "SkipValidation", "Final")
_PLAIN = {"str", "int", "float", "bool", "dict", "list", "tuple", "set"}
_COLLECTIONS = ("tuple", "list", "set")
_CONFIG_DECORATORS = ("config", "dataclass")


@dataclass(frozen=True)
class Words:
    """The values that may follow a flag."""

    takes: Takes = "one"
    kind: Kind = "text"
    #: the only valid values, if the release checks them
    choices: tuple[str, ...] = ()
    #: values that the release knows, if its parser accepts others too
    known: tuple[str, ...] = ()
    #: case and hyphens of a value are ignored
    folds: bool = False
    #: an empty word and ``None`` mean no value
    nullable: bool = False
    #: keys of an object that becomes a configuration class
    keys: tuple[Key, ...] = ()
    #: also has a form that switches it off
    switch: bool = False


@dataclass(frozen=True)
class Hint:
    """One of the types of a field."""

    kind: str
    #: of a literal
    values: tuple[object, ...] = ()
    #: of a collection
    items: tuple[ast.expr, ...] = ()
    module: Module | None = None
    #: of a configuration class
    found: Found | None = None


class Hints:
    """Reads type annotations of a release."""

    def __init__(self, modules: Modules, *, optional_text: bool) -> None:
        self._modules = modules
        #: whether ``bool | str | None`` is a flag with an optional value
        self._optional_text = optional_text
        self._keys: dict[tuple[str, ast.stmt], tuple[Key, ...]] = {}

    def words(self, module: Module, annotation: ast.expr) -> Words:
        """The command-line values for a field of this type."""
        hints = list(self._of(module, annotation))
        kinds = {hint.kind for hint in hints}
        words = self._words(hints, kinds)
        is_open = words.takes == "one" and words.kind == "text" and not words.choices
        return replace(
            words,
            known=tuple(dict.fromkeys(self.known(module, annotation))) if is_open else (),
            nullable="none" in kinds and "bool" not in kinds,
        )

    def _words(self, hints: list[Hint], kinds: set[str]) -> Words:  # noqa: PLR0911 - one a type
        if "dataclass" in kinds:
            (found, *_) = (hint.found for hint in hints if hint.found is not None)
            return Words(kind="object", keys=self.keys_of(found))
        if self._optional_text and kinds == {"bool", "str", "none"}:
            return Words("optional")
        if "bool" in kinds:
            return Words("nothing", "true-or-false", switch=True)
        for literal in (hint for hint in hints if hint.kind == "literal"):
            return self._literal(literal, checked="str" not in kinds)
        for hint in hints:
            if hint.kind in _COLLECTIONS:
                return self._collection(hint)
        for name, kind in (("int", "integer"), ("float", "number")):
            if name in kinds:
                return Words(kind=kind)  # type: ignore[arg-type]
        if "dict" in kinds and not kinds & {"str", "other"}:
            return Words(kind="json")
        return Words()

    @staticmethod
    def _literal(hint: Hint, *, checked: bool) -> Words:
        kind: Kind = "integer" if isinstance(hint.values[0], int) else "text"
        choices = tuple(sorted(str(value) for value in hint.values)) if checked else ()
        return Words(kind=kind, choices=choices)

    def _collection(self, hint: Hint) -> Words:
        assert hint.module is not None
        rest = [i for i in hint.items if not _is_ellipsis(i)]
        fixed = hint.kind == "tuple" and len(rest) == len(hint.items)
        takes: Takes = len(rest) if fixed and rest else "many"
        if not rest:
            return Words(takes)
        inner = self.words(hint.module, rest[0])
        return replace(inner, takes=takes) if inner.choices else Words(takes, inner.kind)

    def keys_of(self, found: Found) -> tuple[Key, ...]:
        """The fields of a configuration class; vLLM's classes refuse others."""
        place = (found.module.name, found.node)
        if place not in self._keys:
            self._keys[place] = ()  # a class in itself
            made: dict[str, Key] = {}
            for owner in self._modules.bases(found):
                assert isinstance(owner.node, ast.ClassDef)
                for node in filter(_is_given, owner.node.body):
                    assert isinstance(node, ast.AnnAssign)
                    words, name = self.words(owner.module, node.annotation), _name(node.target)
                    choices = words.choices if words.takes == "one" else ()
                    made[name] = Key(name=name, choices=choices, keys=words.keys)
            self._keys[place] = tuple(made.values())
        return self._keys[place]

    def _of(self, module: Module, node: ast.expr) -> Iterator[Hint]:
        if isinstance(node, ast.BinOp):
            yield from self._of(module, node.left)
            yield from self._of(module, node.right)
        elif isinstance(node, ast.Constant) and node.value is None:
            yield Hint("none")
        elif isinstance(node, ast.Name):
            yield from self._named(module, node.id)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(module, node)
        else:
            yield Hint("other")

    def _named(self, module: Module, name: str) -> Iterator[Hint]:
        found = self._modules.find(module, name)
        if found is not None and found.value is not None:
            yield from self._of(found.module, found.value)
        elif found is not None and isinstance(found.node, ast.ClassDef):
            kind = self._class_kind(found.node)
            yield Hint(kind, found=found if kind == "dataclass" else None)
        else:
            yield Hint(name, module=module) if name in _PLAIN else Hint("other")

    @staticmethod
    def _class_kind(node: ast.ClassDef) -> str:
        decorators = {_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
        if decorators & set(_CONFIG_DECORATORS):
            return "dataclass"
        bases = {_name(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases}
        return "dict" if "dict" in bases else "other"

    def _subscript(self, module: Module, node: ast.Subscript) -> Iterator[Hint]:
        name = _name(node.value)
        items = tuple(node.slice.elts) if isinstance(node.slice, ast.Tuple) else (node.slice,)
        if name == "Literal":
            yield Hint("literal", tuple(self._values(module, items)))
        elif name == "Optional":
            yield from self._of(module, items[0])
            yield Hint("none")
        elif name == "Union":
            for item in items:
                yield from self._of(module, item)
        elif name in _WRAPPERS:
            yield from self._of(module, items[0])
        elif name.lower() in _PLAIN:
            yield Hint(name.lower(), items=items, module=module)
        else:
            yield Hint("other")

    def _values(self, module: Module, items: tuple[ast.expr, ...]) -> Iterator[object]:
        for item in items:
            if isinstance(item, ast.Constant):
                yield item.value
            else:  # a literal in a literal is the same as its values
                for hint in self._of(module, item):
                    yield from hint.values

    def known(self, module: Module, node: ast.expr) -> Iterator[str]:
        """The values of all literals in an annotation, as a type checker sees them."""
        if isinstance(node, ast.BinOp):
            yield from self.known(module, node.left)
            yield from self.known(module, node.right)
        elif isinstance(node, ast.Name):
            found = self._modules.find_type(module, node.id)
            if found is not None and found.value is not None:
                yield from self.known(found.module, found.value)
        elif isinstance(node, ast.Subscript):
            for hint in self._subscript(module, node):
                yield from (value for value in hint.values if isinstance(value, str))

    def values_of(self, module: Module, name: str) -> tuple[str, ...]:
        """The values of a named literal type."""
        hints = self._named(module, name)
        return tuple(str(value) for hint in hints for value in hint.values)


def _is_given(node: ast.stmt) -> bool:
    """Whether it is a parameter of the class: ``ClassVar`` and ``init=False`` are not."""
    if not isinstance(node, ast.AnnAssign):
        return False
    outer = node.annotation.value if isinstance(node.annotation, ast.Subscript) else node.annotation
    given = node.value.keywords if isinstance(node.value, ast.Call) else []
    computed = any(k.arg == "init" and ast.unparse(k.value) == "False" for k in given)
    return not computed and _name(outer) != "ClassVar"


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


#: ``vllm serve`` itself: the parser is the ``make_arg_parser`` that it imports.
SERVE = "vllm.entrypoints.cli.serve"
_MAKE = "make_arg_parser"
_KWARGS = "get_kwargs"
_STORE_TRUE = ("store_true", "store_false")
_SWITCH = "BooleanOptionalAction"
_INVERSES = "_inverse_prefixes"
#: Fields whose type lists only some values: vLLM registers more tokenizers than modes
#: (vllm/tokenizers/registry.py).
_OPEN = ("tokenizer_mode",)
#: The kind of value for each ``type=``.
_TYPES: dict[str, Kind] = {
    "json.loads": "json", "int": "integer", "float": "number", "str": "text",
    "human_readable_int": "size", "human_readable_int_or_auto": "size-or-auto",
}  # fmt: skip

#: Fields that are objects, and the classes that the release makes of them at once.
_CLASSES = {"speculative_config": ("vllm.config.speculative", "SpeculativeConfig")}

Fields = dict[str, Words]


@dataclass(frozen=True)
class RawFlag:
    """A flag of the parser."""

    names: tuple[str, ...]
    words: Words
    #: names that switch it off
    off: tuple[str, ...] = ()
    deprecated: str = ""


class FlagReader:
    """Follows the statements that build a release's parser."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        arguments = modules.needed("vllm.engine.arg_utils")
        self._hints = Hints(modules, optional_text="{bool, str, type(None)}" in arguments.source)
        self._sizes = _sizes(arguments)
        self._inverses = self._inverse_prefixes()
        self._fields: dict[tuple[str, str], Fields] = {}

    def read(self) -> list[RawFlag]:
        """All flags, in the parser's order.

        Raises:
            UsageError: the release builds its parser in an unknown way.
        """
        serve = self._modules.needed(SERVE)
        make = self._modules.find(serve, _MAKE)
        if make is None or not isinstance(make.node, ast.FunctionDef):
            raise UsageError(f"{SERVE} of this vLLM does not import {_MAKE}")
        return list(_Follow(self, make.module).run(make.node.body))

    # -- what the parser makes of the fields

    def fields(self, found: Found) -> Fields:
        """What the fields of a configuration class take."""
        assert isinstance(found.node, ast.ClassDef)
        key = (found.module.name, found.node.name)
        if key not in self._fields:
            made: Fields = {}
            for owner in self._modules.bases(found):
                made |= dict(self._own_fields(owner))
            self._fields[key] = made
        return dict(self._fields[key])

    def _own_fields(self, owner: Found) -> Iterator[tuple[str, Words]]:
        assert isinstance(owner.node, ast.ClassDef)
        for node in owner.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            outer = node.annotation
            wrapped = _name(outer.value) if isinstance(outer, ast.Subscript) else _name(outer)
            if wrapped not in ("ClassVar", "InitVar"):  # dataclasses do not count these
                words = self._as_class(node.target.id, self._hints.words(owner.module, outer))
                size = self._sizes.get(node.target.id) if words.kind == "integer" else None
                known = words.known or self._looked_up(owner, outer)
                known = () if node.target.id in _OPEN else known
                yield node.target.id, replace(words, kind=size or words.kind, known=known)

    def _as_class(self, field: str, words: Words) -> Words:
        """What a field takes; of a plain object that the release makes a class of, its keys."""
        module, name = _CLASSES.get(field, ("", ""))
        owner = self._modules.module(module) if module and words.kind == "json" else None
        found = self._modules.find(owner, name) if owner is not None else None
        if found is None or not isinstance(found.node, ast.ClassDef):
            return words
        return replace(words, keys=self._hints.keys_of(found))

    def _looked_up(self, owner: Found, annotation: ast.expr) -> tuple[str, ...]:
        """The names of an enumeration in which a validator looks up a word, in capitals."""
        for node in ast.walk(annotation):
            lookup = f"{_name(node)}[value.upper()]"
            if not isinstance(node, ast.Name) or lookup not in owner.module.source:
                continue
            found = self._modules.find(owner.module, node.id)
            if found is not None and isinstance(found.node, ast.ClassDef):
                assigned = (n for n in found.node.body if isinstance(n, ast.Assign))
                return ("auto", *(_name(n.targets[0]) for n in assigned))
        return ()

    def switch(self, names: Sequence[str], words: Words, deprecated: str) -> RawFlag:
        """A flag with its ``--no-`` forms, and with ``--disable-`` for ``--enable-`` if so."""
        long = [name for name in names if name.startswith("--")]
        off = [f"--no-{name.removeprefix('--')}" for name in long]
        for name in long:
            for prefix, inverse in self._inverses.items():
                if name.startswith(prefix):
                    off.append(inverse + name.removeprefix(prefix))
        switched = replace(
            words, takes="nothing", kind="true-or-false", switch=True, choices=(), known=()
        )
        return RawFlag((*names, *off), switched, tuple(off), deprecated)

    def _inverse_prefixes(self) -> dict[str, str]:
        parsers = self._modules.module("vllm.utils.argparse_utils")
        if parsers is None:
            return {}
        for node in parsers.names.values():
            for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.Assign) and _name(inner.targets[0]) == _INVERSES:
                    found: dict[str, str] = ast.literal_eval(inner.value)
                    return found
        return {}

    # -- helpers for following statements

    def find(self, module: Module, name: str) -> Found | None:
        """The definition of a name, as seen from a module."""
        return self._modules.find(module, name)

    def methods(self, owner: Found, name: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
        """A method as a class and its bases define it, the lowest first."""
        for one in self._modules.bases(owner):
            assert isinstance(one.node, ast.ClassDef)
            for node in one.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    yield one.module, node

    def literal(self, module: Module, name: str) -> tuple[str, ...]:
        """The values of a named literal type."""
        return self._hints.values_of(module, name)


class _Follow:
    """Follows the statements of one function; ``owner`` is the class that it is a method of."""

    def __init__(self, reader: FlagReader, module: Module, owner: Found | None = None) -> None:
        self._reader, self._module, self._owner = reader, module, owner
        self._bound: dict[str, Fields] = {}
        #: a name for one field of a configuration, by that name
        self._alias: dict[str, tuple[Fields, str]] = {}

    def run(self, body: Sequence[ast.stmt]) -> Iterator[RawFlag]:
        for node in body:
            if isinstance(node, ast.If):
                yield from self.run(node.body)
            elif isinstance(node, ast.For):
                yield from self._loop(node)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                yield from self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.AugAssign):
                self._change(node.target, None)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    self._forget(target)
            elif isinstance(node, (ast.Expr, ast.Return)) and isinstance(node.value, ast.Call):
                yield from self._call(node.value)

    # -- statements

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[RawFlag]:
        if isinstance(target, ast.Subscript):
            self._change(target, value)
            return
        name = _name(target)
        if isinstance(value, ast.Subscript):  # one = kwargs["field"]; get_kwargs(C)["field"]
            fields, key = self._fields_of(value.value), _text(value.slice)
            if fields is not None and key in fields:
                self._alias[name] = (fields, key)
        elif isinstance(value, ast.Call):
            fields = self._fields_of(value)
            if fields is not None:
                self._bound[name] = fields
            elif _name(value.func) == "_customize_cli_kwargs" and self._owner is not None:
                self._customize(name)
            else:
                yield from self._call(value)

    def _customize(self, name: str) -> None:
        assert self._owner is not None
        for module, method in self._reader.methods(self._owner, "_customize_cli_kwargs"):
            inner = _Follow(self._reader, module)
            inner._bound[method.args.args[1].arg] = self._bound[name]
            list(inner.run(method.body))

    def _loop(self, node: ast.For) -> Iterator[RawFlag]:
        """``for key, value in kwargs.items(): add_argument(f"--{key...}", **value)``."""
        over = node.iter
        fields = None
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute):
            fields = self._fields_of(over.func.value) if over.func.attr == "items" else None
        if fields is None:
            if "add_argument" in ast.unparse(node):
                raise UsageError(f"{self._module.name}: a loop adds arguments in an unknown way")
            return
        for key, words in fields.items():
            yield self._made([f"--{key.replace('_', '-')}"], words, "")

    def _call(self, call: ast.Call) -> Iterator[RawFlag]:
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr == "add_argument":
            yield from self._argument(call)
        elif isinstance(func, ast.Attribute) and func.attr == "add_cli_args":
            owner = self._reader.find(self._module, _name(func.value))
            if owner is None or not isinstance(owner.node, ast.ClassDef):
                raise UsageError(f"{self._module.name}: {ast.unparse(func)} is not known")
            *_, (module, method) = self._reader.methods(owner, func.attr)
            yield from _Follow(self._reader, module, owner).run(method.body)
        elif isinstance(func, ast.Attribute) and func.attr == "remove":
            self._remove(func.value, call.args[0])

    # -- changes to a field's arguments

    def _fields_of(self, node: ast.expr) -> Fields | None:
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Call) and _name(node.func) == _KWARGS:
            named = _name(node.args[0])
            owner = self._owner if named == "cls" else self._reader.find(self._module, named)
            if owner is None or not isinstance(owner.node, ast.ClassDef):
                raise UsageError(f"{self._module.name}: {ast.unparse(node)} is not known")
            return self._reader.fields(owner)
        return None

    def _place(self, node: ast.expr) -> tuple[Fields, str, str] | None:
        """``kwargs["field"]["key"]`` and ``one["key"]``, where one is a field's."""
        if not isinstance(node, ast.Subscript):
            return None
        key = _text(node.slice)
        if isinstance(node.value, ast.Name) and node.value.id in self._alias:
            return *self._alias[node.value.id], key
        if isinstance(node.value, ast.Subscript):
            fields = self._fields_of(node.value.value)
            if fields is not None:
                return fields, _text(node.value.slice), key
        return None

    def _change(self, target: ast.expr, value: ast.expr | None) -> None:
        place = self._place(target)
        if place is None:
            return
        fields, name, key = place
        if value is None:  # ``+=``: more choices than can be said
            fields[name] = replace(fields[name], choices=())
        else:
            fields[name] = self._with(fields[name], key, value)

    def _forget(self, target: ast.expr) -> None:
        place = self._place(target)
        if place is not None and place[2] == "nargs":
            place[0][place[1]] = replace(place[0][place[1]], takes="one")

    def _remove(self, target: ast.expr, value: ast.expr) -> None:
        place = self._place(target)
        if place is not None and place[2] == "choices":
            fields, name, _ = place
            gone = self._text_of(value)
            kept = tuple(c for c in fields[name].choices if c != gone)
            fields[name] = replace(fields[name], choices=kept)

    def _with(self, words: Words, key: str, value: ast.expr) -> Words:  # noqa: PLR0911 - one a key
        source = ast.unparse(value)
        if key == "type":
            return self._typed(words, source)
        if key == "nargs":
            counted = {"?": "optional", "*": "many", "+": "many"}.get(_text(value))
            return replace(words, takes=counted) if counted else words  # type: ignore[arg-type]
        if key == "choices":
            return replace(words, choices=self._choices(value), known=())
        if key == "action":
            if _text(value) in _STORE_TRUE:
                return replace(words, takes="nothing", kind="true-or-false")
            if source.endswith(_SWITCH):
                return replace(words, takes="nothing", kind="true-or-false", switch=True)
            return replace(words, switch=False)
        return words

    @staticmethod
    def _typed(words: Words, source: str) -> Words:
        """``type=``: json.loads, int, optional_type(str), and a lambda that folds."""
        if ".lower()" in source and ".replace(" in source:
            return replace(words, folds=True)
        inner = source.removeprefix("optional_type(").removesuffix(")")
        kind = _TYPES.get(inner.removeprefix("parse_type("), words.kind)
        keys = words.keys if kind in ("object", "json") else ()
        return replace(words, kind=kind, nullable=inner != source, keys=keys)

    def _choices(self, node: ast.expr) -> tuple[str, ...]:
        """The values of a list, or of a literal type; nothing where they depend on the machine."""
        if isinstance(node, (ast.List, ast.Tuple)):
            return tuple(sorted(filter(None, map(_text, node.elts))))
        if isinstance(node, ast.Call) and _name(node.func) == "get_args":
            return tuple(sorted(self._reader.literal(self._module, _name(node.args[0]))))
        return ()

    def _text_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            found = self._reader.find(self._module, node.id)
            return _text(found.value) if found is not None and found.value is not None else ""
        return _text(node)

    # -- arguments

    def _argument(self, call: ast.Call) -> Iterator[RawFlag]:
        names = [_text(word) for word in call.args]
        if not all(name.startswith("-") for name in names):
            return  # the model, which has no flag
        words = Words()
        deprecated = ""
        for keyword in call.keywords:
            if keyword.arg is None:
                words = self._spread(keyword.value)
        for keyword in call.keywords:
            if keyword.arg == "deprecated":
                deprecated = deprecated or "deprecated"
            elif keyword.arg == "help":
                text = self._text_of(keyword.value)
                deprecated = text if "deprecated" in text else deprecated
            elif keyword.arg is not None:
                words = self._with(words, keyword.arg, keyword.value)
        yield self._made(names, words, deprecated)

    def _made(self, names: list[str], words: Words, deprecated: str) -> RawFlag:
        if words.switch:
            return self._reader.switch(names, words, deprecated)
        return RawFlag(tuple(names), words, (), deprecated)

    def _spread(self, node: ast.expr) -> Words:
        if isinstance(node, ast.Name) and node.id in self._alias:
            fields, name = self._alias[node.id]
            return fields[name]
        if isinstance(node, ast.Subscript):
            fields_of = self._fields_of(node.value)
            name = _text(node.slice)
            if fields_of is not None and name in fields_of:
                return fields_of[name]
        if isinstance(node, ast.Dict):  # {**kwargs["field"], "default": None}
            words = Words()
            for key, value in zip(node.keys, node.values, strict=True):
                words = self._spread(value) if key is None else self._with(words, _text(key), value)
            return words
        raise UsageError(
            f"{self._module.name}: what {ast.unparse(node)} takes cannot be read from the source"
        )


def _sizes(arguments: Module) -> dict[str, Kind]:
    """The fields that vLLM reads as sizes: ``if name in (...): kwargs[name]["type"] = ...``."""
    found: dict[str, Kind] = {}
    for function in ("get_kwargs", "_compute_kwargs"):
        body = arguments.names.get(function)
        nodes = list(ast.walk(body)) if isinstance(body, ast.FunctionDef) else []
        sets = {_name(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
        for node in nodes:
            if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
                continue
            first = node.body[0]
            kind = _TYPES.get(_name(first.value)) if isinstance(first, ast.Assign) else None
            if kind in ("size", "size-or-auto") and _name(node.test.left) == "name":
                named = node.test.comparators[0]
                held = sets.get(named.id, named) if isinstance(named, ast.Name) else named
                found |= {_text(n): kind for n in ast.walk(held) if _text(n)}
    return found


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


#: Files that are fetched together first, if a release has them: those that were read
#: of the releases from 0.17.0 to 0.33.0, besides all of ``vllm/config``.
FIRST = (
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/anthropic/protocol.py",
    "vllm/entrypoints/chat_utils.py",
    "vllm/entrypoints/cli/serve.py",
    "vllm/entrypoints/common/cli_args.py",
    "vllm/entrypoints/launchers/cli_args.py",
    "vllm/entrypoints/openai/cli_args.py",
    "vllm/entrypoints/openai/models/protocol.py",
    "vllm/envs.py",
    "vllm/reasoning/__init__.py",
    "vllm/renderers/chat_utils/__init__.py",
    "vllm/renderers/chat_utils/types.py",
    "vllm/tool_parsers/__init__.py",
    "vllm/tool_parsers/tool_strict_level.py",
    "vllm/transformers_utils/config.py",
    "vllm/utils/argparse_utils.py",
    "vllm/v1/attention/backends/mla/prefill/registry.py",
    "vllm/v1/attention/backends/registry.py",
)
_CONFIG = "vllm/config"
#: The modules and tables in which releases register parsers.
_REASONING = ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")
_TOOLS = ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
#: Flags that take the name of a parser, and the flag for a plugin from the checkpoint.
REASONING_FLAG, TOOL_FLAG = "--reasoning-parser", "--tool-call-parser"
PLUGINS = {REASONING_FLAG: "--reasoning-parser-plugin", TOOL_FLAG: "--tool-parser-plugin"}
#: Lets the model call tools; it needs a parser.
TOOL_CHOICE = "--enable-auto-tool-choice"
#: Values that mean no parser.
_NO_PARSER = ("", "none")


def of_plugins(names: Collection[str]) -> frozenset[str]:
    """The flags that code decides which is not run: those of parsers that come with a plugin."""
    parsers = {name for name, plugin in PLUGINS.items() if plugin in names}
    return frozenset(parsers | ({TOOL_CHOICE} if TOOL_FLAG in parsers else set()))


#: vLLM's variables begin with this; vLLM warns about unknown ones.
VARIABLES = "VLLM_"


class Flag(Part, frozen=True, kw_only=True):
    """One flag of ``vllm serve``."""

    names: Annotated[tuple[Text, ...], Meta(description="the long name first")]
    takes: Annotated[Takes, Meta(description="how many words follow; a number is exactly that")]
    kind: Kind
    choices: Annotated[
        tuple[str, ...], Meta(description="the only valid values, if the release checks them")
    ] = ()
    known: Annotated[
        tuple[str, ...], Meta(description="values that the release knows, if it accepts others too")
    ] = ()
    folds: Annotated[bool, Meta(description="case and hyphens of a value are ignored")] = False
    nullable: Annotated[bool, Meta(description="an empty word and None are no value")] = False
    off: Annotated[tuple[Text, ...], Meta(description="names that switch it off")] = ()
    keys: Annotated[
        tuple[Key, ...], Meta(description="of an object, where it is that of a configuration class")
    ] = ()
    deprecated: Annotated[
        str, Meta(description="the release's notice of deprecation or removal")
    ] = ""

    @classmethod
    def of(cls, raw: RawFlag) -> Flag:
        """Convert a flag from the reader."""
        words = raw.words
        ordered = sorted(raw.names, key=lambda name: not name.startswith("--"))
        return cls(
            names=tuple(ordered), takes=words.takes, kind=words.kind, choices=words.choices,
            known=words.known, folds=words.folds, nullable=words.nullable, off=raw.off,
            keys=words.keys, deprecated=raw.deprecated,
        )  # fmt: skip

    def refusal(self, value: str | None) -> str:
        """Why the release's parser would refuse this value; empty if it accepts it.

        The model or the machine may still refuse a value that the parser accepts.
        """
        if self.takes == "nothing":
            return "" if value is None else "takes no value"
        if value is None:
            return "" if self.takes == "optional" else "needs a value"
        if self.choices and self.folded(value) not in self.choices:
            return _not_among(value, self.choices)
        if self.known and not self._may_be(value):
            return _not_among(value, self.known)
        return self._not_of_its_kind(value) if self.takes in ("one", "optional") else ""

    def _not_of_its_kind(self, value: str) -> str:
        wanted = wrong_kind(self.kind, value, nullable=self.nullable)
        return (
            f"takes {wanted}, not {shortened(value)!r}"
            if wanted
            else wrong_key(self.keys, self._spelled(in_json(value)))
        )

    def _spelled(self, value: object) -> object:
        """Keys of a plain object with underscores: newer releases read both."""
        if self.kind != "json" or not isinstance(value, dict):
            return value
        return {str(key).replace("-", "_"): inner for key, inner in value.items()}

    def key_refusal(self, path: str, value: str | None) -> str:
        """The same for one key of an object: ``--kernel-config.linear_backend VALUE``."""
        if self.kind not in ("json", "object"):  # the parser makes JSON of the keys: a text too
            return "takes no keys" if self.refusal("{}") else ""
        nested: object = None if value is None else in_json(value)
        for key in reversed(path.removesuffix("+").split(".")):
            nested = {key: nested}
        return wrong_key(self.keys, nested)

    def _may_be(self, value: str) -> bool:
        """Whether it may be a known value, or the path of a class."""
        if (self.nullable and value in NONE) or set(value) & set("./:"):
            return True
        return value.lower() in {known.lower() for known in self.known}

    def folded(self, value: str) -> str:
        """A value as vLLM normalises it: ``--moe-backend`` accepts flashinfer-b12x too."""
        return value.lower().replace("-", "_") if self.folds else value


def _not_among(value: str, known: tuple[str, ...]) -> str:
    guess = did_you_mean(value, known)
    return f"has no value {shortened(value)!r}{guess} (it has {', '.join(known)})"


#: What a release does with custom logits processors where it decodes speculatively.
Processors = Literal["", "refused", "refused by runner V1"]


class ServeInterface(Part, frozen=True, kw_only=True, dict=True):
    """What ``vllm serve`` of one release accepts."""

    vllm: Text
    flags: tuple[Flag, ...]
    variables: Annotated[
        dict[str, tuple[str, ...]],
        Meta(description="names that envs.py reads, with the values that it accepts; none: any"),
    ]
    reasoning_parsers: tuple[str, ...]
    tool_parsers: tuple[str, ...]
    processors: Annotated[
        Processors,
        Meta(description="what it does with custom logits processors and speculative decoding"),
    ] = ""

    def flag(self, name: str) -> Flag | None:
        """A flag by one of its names, or by the beginning of only one, as argparse reads them.

        Like vLLM, this reads underscores as hyphens.
        """
        name = canonical(name) if name.startswith("--") else name
        exact = self._by_name.get(name)
        if exact is not None or not name.startswith("--"):
            return exact
        longer = {full for full in self._spellings if full.startswith(name)}
        return self._by_name.get(longer.pop()) if len(longer) == 1 else None

    @cached_property
    def _spellings(self) -> frozenset[str]:
        """All long names, and those that switch a flag off."""
        names = {*self._by_name, *(off for flag in self.flags for off in flag.off)}
        return frozenset(name for name in names if name.startswith("--"))

    @cached_property
    def _by_name(self) -> dict[str, Flag]:
        return {name: flag for flag in reversed(self.flags) for name in flag.names}

    def refusal(self, name: str, value: str | None) -> str:
        """Why this release would refuse a flag with this value; empty if it accepts it."""
        plain, _, key = canonical(name).partition(".")
        found = self.flag(plain)
        if found is None:
            guess = did_you_mean(name, self._by_name)
            return f"vLLM {self.vllm} has no flag {shortened(name)}{guess}"
        if key:  # --kernel-config.linear_backend VALUE
            why = found.key_refusal(key, value)
            return f"{plain} of vLLM {self.vllm} {why}" if why else ""
        why = found.refusal(value)
        return f"{shortened(name)} of vLLM {self.vllm} {why}" if why else ""

    def variable_refusal(self, name: str, value: str) -> str:
        """Why this release would ignore a variable; empty if it reads it, or it is not vLLM's."""
        if not name.startswith(VARIABLES):
            return ""
        if name not in self.variables:
            guess = did_you_mean(name, self.variables)
            return f"vLLM {self.vllm} does not read the variable {shortened(name)}{guess}"
        choices = self.variables[name]
        wrong = [one for one in value.split(",") if choices and one not in choices]
        if wrong:
            value = shortened(wrong[0])
            return f"{name} of vLLM {self.vllm} has no value {value!r} ({', '.join(choices)})"
        return ""

    def parser_refusal(self, flag: str, value: str) -> str:
        """Why no built-in parser has this name; empty if one has, or for other flags."""
        built_in = self.parsers(flag)
        if not built_in or value in built_in or value.lower() in _NO_PARSER:
            return ""
        guess = did_you_mean(value, built_in)
        return f"vLLM {self.vllm} has no parser {shortened(value)!r} for {flag}{guess}"

    def parsers(self, flag: str) -> tuple[str, ...]:
        """The built-in parsers that a flag chooses from."""
        return {REASONING_FLAG: self.reasoning_parsers, TOOL_FLAG: self.tool_parsers}.get(flag, ())


def canonical(name: str) -> str:
    """A long flag in the spelling of vLLM's parser: hyphens up to the first dot."""
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


def name_of(words: Sequence[str]) -> str:
    """The name of a flag with its values, as vLLM's parser spells it."""
    return canonical(words[0].partition("=")[0])


class _Kept(Part, frozen=True, kw_only=True):
    """A cached interface of a release, and the files that it was read from."""

    interface: ServeInterface
    files: Annotated[
        dict[str, Sha256 | None],
        Meta(description="sha256 of each file that was read, null of one that is not there"),
    ]


#: Cached by the release's first files and by the programs that read them; one is 60 kB.
_RESULTS = Results(
    "interfaces",
    (("serving", "serveflags.py"), ("applier", "edits.py")),
    200,
)


def interface_in(tree: Tree, vllm: str) -> ServeInterface:
    """The interface of the vLLM in a tree; cached by its files.

    Raises:
        UsageError: the release builds its parser in an unknown way.
        RemoteError: the package index or the registry does not answer.
    """
    config = [f"{_CONFIG}/{name}" for name in tree.children(_CONFIG) if name.endswith(".py")]
    first = [*FIRST, *config]
    inputs = [vllm, [[path, tree.digest(path)] for path in first]]
    before = _RESULTS.get(inputs, _Kept)
    if before and all(tree.digest(path) == digest for path, digest in before.files.items()):
        return before.interface
    digests: dict[str, str | None] = {}

    def noted(path: str) -> bytes | None:
        digests[path] = tree.digest(path)
        return tree.read(path)

    with console.progress(f"reading the arguments of vLLM {vllm}", unit="", whole=True):
        preload(tree, first)
        interface = read_interface(noted, vllm)
    _RESULTS.put(inputs, _Kept(interface=interface, files=digests))
    return interface


def read_interface(read: ReadFile, vllm: str) -> ServeInterface:
    """Read the interface from a release's files.

    Raises:
        UsageError: the release builds its parser in an unknown way.
    """
    modules = Modules(read)
    known = read_envs(modules.needed("vllm.envs").source).known
    return ServeInterface(
        vllm=vllm,
        flags=tuple(map(Flag.of, FlagReader(modules).read())),
        variables={name: choices or () for name, choices in sorted(known.items())},
        reasoning_parsers=_registered(modules, *_REASONING),
        tool_parsers=_registered(modules, *_TOOLS),
        processors=_processors(read),
    )


#: Where each model runner of a release makes its logits processors.
_RUNNER_V1 = "vllm/v1/sample/logits_processor/__init__.py"
_RUNNER_V2 = "vllm/v1/worker/gpu/sample/logits_processor/loader.py"


def _processors(read: ReadFile) -> Processors:
    """Whether a release refuses custom logits processors with speculative decoding.

    Runner V1 does so where it makes them: it raises in a branch on the speculation.  Older
    releases give every server with processors to that runner; newer ones have them in V2 too.
    """
    try:
        tree = ast.parse(read(_RUNNER_V1) or b"")
    except (SyntaxError, ValueError):
        return ""
    branches = (
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "build_logitsprocs"
        for node in ast.walk(function)
        if isinstance(node, ast.If) and "speculative_config" in ast.dump(node.test)
    )
    if not any(isinstance(node, ast.Raise) for branch in branches for node in ast.walk(branch)):
        return ""
    return "refused" if read(_RUNNER_V2) is None else "refused by runner V1"


def interface_of_wheels(ref: str) -> ServeInterface:
    """The interface of a release, from its wheel: ``pypi:vllm==0.33.0``.

    Raises:
        SparkBuildError: the release does not exist, or it cannot be read.
    """
    return interface_of_base(ref, lambda request: identify_pypi(request, request.ref.place))


def interface_of_base(ref: str, identify: Callable[[BaseRequest], Subject]) -> ServeInterface:
    """The interface of the vLLM of a base, which ``identify`` opens.

    Raises:
        SparkBuildError: it is not a base with vLLM, or it cannot be read.
    """
    request = BaseRequest(ref=Ref(ref), pins={}, tracked=("vllm",), index=PackageIndex())
    with closing(identify(request)) as base:
        return interface_in(base.tree, base.identity.packages["vllm"])


def _registered(modules: Modules, module: str, table: str) -> tuple[str, ...]:
    """The keys of a table of parsers.

    Raises:
        UsageError: there is no such table.
    """
    found = modules.needed(module).names.get(table)
    value = getattr(found, "value", None)
    keys = value.keys if isinstance(value, ast.Dict) else ()
    names = sorted(str(key.value) for key in keys if isinstance(key, ast.Constant))
    if not names:
        raise UsageError(f"{module} of this vLLM has no table {table}: its parsers are unknown")
    return tuple(names)


class Replaced(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variable that releases no longer read, or never did, and the flag with the same effect."""

    name: Text
    flag: Text
    #: values that the flag spells differently; an empty one needs no flag
    values: dict[str, str] = msgspec.field(default_factory=dict)
    source: Text

    def value(self, old: str) -> str:
        """The flag's value for a value of the variable; empty if no flag is needed."""
        return self.values.get(old, old)

    def flag_refusal(self, interface: ServeInterface, old: str) -> str:
        """Why a release would refuse the flag too; empty if it accepts it, or needs none."""
        value = self.value(old)
        return interface.refusal(self.flag, value) if value else ""


@cache
def replaced() -> dict[str, Replaced]:
    """All of them, by the variable's name."""
    raw = tomllib.loads(package_file("data", "serving-replacements.toml").read_text("utf-8"))
    return {one.name: one for one in msgspec.convert(raw["variable"], list[Replaced])}
