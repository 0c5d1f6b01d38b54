"""The flags of ``vllm serve``, read from a release's source without running it.

vLLM builds its parser from the fields of configuration classes: ``get_kwargs(ModelConfig)`` gives
what each field takes, and ``add_argument("--flag", **kwargs["field"])`` gives it a name.  The same
statements are followed here, without running them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.serving.hints import Hints, Words, _name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.serving.modules import Found, Module, Modules
    from builder.serving.values import Kind

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
                words = self._hints.words(owner.module, outer)
                size = self._sizes.get(node.target.id) if words.kind == "integer" else None
                known = words.known or self._looked_up(owner, outer)
                known = () if node.target.id in _OPEN else known
                yield node.target.id, replace(words, kind=size or words.kind, known=known)

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
        keys = words.keys if kind == "object" else ()
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
