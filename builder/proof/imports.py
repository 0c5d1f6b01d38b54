"""Level ``imports``: whether every name that patched modules use exists.

It parses the modules without running them, follows their imports, and compares calls
of imported functions with their signatures.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from builder.applier.receipts import receipts_of
from builder.proof.checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.receipts import Receipt
    from builder.applier.trees import Tree
    from builder.proof.target import VerifyTarget

#: Top-level packages that layers patch; other names are not followed.
PACKAGES = ("vllm", "flashinfer", "cutlass")
#: Directories below site-packages that packages' .pth files add to sys.path.
ROOTS = (
    "",
    "nvidia_cutlass_dsl/python_packages/",
    "nvidia_cutlass_dsl/dsl_packages/",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """The top-level definitions of a module, in any branch."""

    path: str
    #: name -> the function of that name, without its body; None where it is something else
    names: Mapping[str, Function | None]
    dynamic: bool


class Modules:
    """Finds and parses modules of a tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._cache: dict[str, Module | None] = {}

    def find(self, dotted: str) -> Module | None:
        """The module with a dotted name, or None."""
        if dotted not in self._cache:
            self._cache[dotted] = self._load(dotted)
        return self._cache[dotted]

    def _load(self, dotted: str) -> Module | None:
        stem = dotted.replace(".", "/")
        for root in ROOTS:
            for path in (f"{root}{stem}.py", f"{root}{stem}/__init__.py"):
                data = self._tree.read(path)
                if data is not None:
                    return parse_module(path, data)
            folder, _, name = f"{root}{stem}".rpartition("/")
            siblings = self._tree.children(folder)
            if any(s.startswith(f"{name}.") and s.endswith(".so") for s in siblings):
                return Module(f"{root}{stem}", {}, dynamic=True)
            if name in siblings and self._tree.children(f"{root}{stem}"):
                return Module(f"{root}{stem}", {}, dynamic=False)  # a namespace package
        return None


@lru_cache(maxsize=256)  # a proof of necessity looks at the same modules once for each layer
def parse_module(path: str, data: bytes) -> Module:
    """Names bound at the top level, in any branch; star imports make a module dynamic."""
    names: dict[str, Function | None] = {}
    dynamic = False
    try:
        pending: list[ast.AST] = list(ast.parse(data).body)
    except SyntaxError:  # said once, by the check of that module itself
        return Module(path, {}, dynamic=True)
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.ClassDef):
            node.body = []
            names[node.name] = node if isinstance(node, Function) else None
            dynamic = dynamic or node.name == "__getattr__"
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                dynamic = dynamic or alias.name == "*"
                names[alias.asname or alias.name.split(".")[0]] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
        pending.extend(ast.iter_child_nodes(node))
    return Module(path, names, dynamic)


def check_imports(target: VerifyTarget) -> Iterator[Check]:
    """One check for the imports and one for the calls of each module that a layer edited."""
    modules = Modules(target.tree)
    edited = sorted(_edited(receipts_of(target.tree)))
    if not edited:
        yield Check(
            level="imports",
            name="patched modules",
            status="not-run",
            expected="every imported name exists",
            seen="no module was edited",
            reason="no layer edited a Python module",
            moot=True,
        )
        return
    for path in edited:
        data = target.tree.read(path)
        if data is None:
            yield _result(path, 0, [f"{path} does not exist"])
            continue
        try:
            module = ast.parse(data)
        except SyntaxError as error:
            yield _result(path, 0, [f"line {error.lineno}: {error.msg}"])
            continue
        follower = _Follower(modules, dotted_name(path), path.endswith("/__init__.py"))
        follower.visit(module)
        yield _result(path, follower.followed, follower.problems)


def _edited(receipts: Sequence[Receipt]) -> set[str]:
    return {
        path
        for receipt in receipts
        for path, entry in receipt.files.items()
        if path.endswith(".py") and entry.after and set(entry.ops) - {"wheel"}
    }


def _result(path: str, followed: int, problems: Sequence[str]) -> Check:
    return Check(
        level="imports",
        name=f"names used by {path}",
        status="fail" if problems else "pass",
        expected="every name it imports from a patched package exists, and calls match the "
        "definitions",
        seen="; ".join(problems[:5]) if problems else f"{followed} names and calls followed",
        where=path,
    )


def dotted_name(path: str) -> str:
    """The module name of a file, without roots that are not packages."""
    for root in ROOTS[1:]:
        path = path.removeprefix(root)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class _Follower(ast.NodeVisitor):
    """Follows all imports of one module."""

    def __init__(self, modules: Modules, name: str, is_package: bool) -> None:
        self.modules, self.name, self.is_package = modules, name, is_package
        self.problems: list[str] = []
        self.followed = 0
        self._functions: dict[str, Function] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in PACKAGES:
                self.followed += 1
                if self.modules.find(alias.name) is None:
                    self.problems.append(f"line {node.lineno}: no module {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = self._source(node)
        if source.split(".")[0] not in PACKAGES:
            return
        module = self.modules.find(source)
        for alias in node.names:
            self.followed += 1
            if module is None:
                self.problems.append(f"line {node.lineno}: no module {source}")
                return
            definition = module.names.get(alias.name)
            if alias.name not in module.names and not module.dynamic and alias.name != "*":
                if self.modules.find(f"{source}.{alias.name}") is None:
                    self.problems.append(f"line {node.lineno}: {source} has no {alias.name}")
            elif definition is not None:
                self._functions[alias.asname or alias.name] = definition

    def _source(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self._functions:
            self.followed += 1
            problem = mismatch(node, self._functions[node.func.id])
            if problem:
                self.problems.append(f"line {node.lineno}: {node.func.id}() {problem}")


def mismatch(call: ast.Call, function: Function) -> str | None:
    """Why a call does not match a function's signature, or None; unpacked arguments are ignored."""
    if any(not _keeps_signature(d) for d in function.decorator_list):
        return None
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    by_name = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
    given = [k.arg for k in call.keywords if k.arg is not None]
    unpacked = any(k.arg is None for k in call.keywords) or any(
        isinstance(a, ast.Starred) for a in call.args
    )
    for name in given:
        if name not in by_name and arguments.kwarg is None:
            return f"has no parameter {name!r}"
    if len(call.args) > len(positional) and arguments.vararg is None:
        return f"takes {len(positional)} positional arguments, {len(call.args)} are given"
    if unpacked:
        return None
    return _twice_or_missing(call, arguments, positional, given)


def _twice_or_missing(
    call: ast.Call, arguments: ast.arguments, positional: list[str], given: list[str]
) -> str | None:
    twice = next((name for name in positional[: len(call.args)] if name in given), None)
    if twice is not None and arguments.kwarg is None:
        return f"gets {twice!r} twice"
    required = positional[: len(positional) - len(arguments.defaults)][len(call.args) :]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    missing = next((name for name in required if name not in given), None)
    return None if missing is None else f"misses {missing!r}"


def _keeps_signature(decorator: ast.expr) -> bool:
    """Whether a decorator keeps the signature."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("cache", "lru_cache", "torch_compile", "staticmethod", "wraps")
