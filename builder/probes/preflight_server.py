"""Lets a release check the flags of its server, as ``vllm serve`` does before it builds an engine.

Part of the preflight probe: it runs under the target's interpreter, with the standard library, its
siblings and the target's packages.  The server itself is not imported: it needs packages that are
not here.  Its function is taken from its file, with what that imports.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Where releases check the names of parsers, after their plugins are imported; the newest first.
SERVERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.launcher",
    "vllm.entrypoints.openai.api_server",
)
#: The checks: of combinations of flags, and of the names of parsers.
FLAGS, PARSERS = "validate_parsed_serve_args", "validate_api_server_args"
#: Code of the checkpoint's or of the user's, which decides what parsers there are.
PLUGINS = ("tool_parser_plugin", "reasoning_parser_plugin")


def check(given: argparse.Namespace, arguments: Any) -> str:
    """Let the release refuse the flags of a server; why it could not be asked, or "".

    ``arguments`` is its module of flags.  What it raises on purpose is passed on.  Files are not
    looked for: they are on the machine of the server.
    """
    own = argparse.Namespace(**{**vars(given), "chat_template": None})
    unknown = []
    for name, found in ((FLAGS, lambda: getattr(arguments, FLAGS)), (PARSERS, parser_check)):
        if name == PARSERS and any(getattr(own, plugin, None) for plugin in PLUGINS):
            continue
        try:
            found()(own)
        except Exception as error:
            if is_on_purpose(error):
                raise
            unknown.append(f"{name}: {type(error).__name__}: {error}")
    return "; ".join(unknown)


def is_on_purpose(error: BaseException) -> bool:
    """Whether the release's own code says ``raise``, and no stand-in or missing package did."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return "/vllm/" in last.filename and str(last.line).startswith("raise ")


def parser_check() -> Callable[[argparse.Namespace], None]:
    """The release's function that checks the names of parsers.

    Raises:
        LookupError: no file of it has the function.
    """
    for module in SERVERS:
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            continue
        function = released(spec.origin, PARSERS) if spec and spec.origin else None
        if function is not None:
            return function
    raise LookupError("this release has it elsewhere")


def released(file: str, name: str) -> Callable[[argparse.Namespace], None] | None:
    """A function of a file, with the imports of the file that it uses; nothing else is run."""
    with open(file, encoding="utf-8") as stream:
        body = ast.parse(stream.read()).body
    for function in body:
        if isinstance(function, ast.FunctionDef) and function.name == name:
            used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            parts: list[ast.stmt] = [*imports(body, used), function]
            names: dict[str, Any] = {}
            exec(compile(ast.Module(parts, []), file, "exec"), names)
            check_parsers: Callable[[argparse.Namespace], None] = names[name]
            return check_parsers
    return None


def imports(body: list[ast.stmt], used: set[str]) -> Iterator[ast.stmt]:
    """The imports of a module's names that are used."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            aliases = [alias for alias in node.names if (alias.asname or alias.name) in used]
            if aliases:
                kept = ast.ImportFrom(node.module, aliases, node.level)
                yield ast.copy_location(kept, node)
