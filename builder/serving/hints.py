"""The command-line form of a configuration field, by its type, like vLLM's ``get_kwargs``."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from builder.serving.values import Key, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.modules import Found, Module, Modules

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
            return Words(kind="object", keys=self._keys_of(found))
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

    def _keys_of(self, found: Found) -> tuple[Key, ...]:
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
