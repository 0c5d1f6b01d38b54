"""vLLM's own argument parser of ``vllm serve``, made without a GPU: its flags, and what it parses.

    python arguments.py RUNTIME < REQUEST.json

Packages that the parser's modules only pass by are empty modules here; vLLM's own are all real.
Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import tempfile
import types
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

sys.path.insert(0, sys.argv[1])

from builder.probes import dispatch_device

if TYPE_CHECKING:
    import argparse

#: What the parser's modules import and do not need to make it.
PASSED_BY = ("mistral_common", "cv2", "tiktoken", "partial_json_parser", "openai", "anthropic",
             "openai_harmony", "mcp", "fastapi", "starlette", "uvicorn", "cbor2", "gguf",
             "xgrammar", "outlines_core", "lmformatenforcer",
             "diskcache")  # fmt: skip
#: The modules that have had the parser.
PLACES = (
    "vllm.entrypoints.openai.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.common.cli_args",
)


class Empty(types.ModuleType):
    """A module in which every name is something."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():  # may be inherited from, or stand in an annotation
            made: Any = type(name, (), {"__module__": self.__name__})
        else:
            made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Rest(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of those that are passed by, where they are not installed."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in PASSED_BY:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        self.made.append(spec.name)
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def flags(parser: argparse.ArgumentParser, tried: list[str]) -> list[dict[str, Any]]:
    """Every flag with all of its names, those that help does not show included."""
    names: dict[int, list[str]] = {}
    actions = {id(action): action for action in parser._option_string_actions.values()}
    for name, action in parser._option_string_actions.items():
        names.setdefault(id(action), []).append(name)
    return [
        {
            "names": names[key],
            "nargs": action.nargs,
            "choices": None if action.choices is None else [str(c) for c in action.choices],
            "tried": [value for value in tried if takes(parser, action, value)],
            "keys": sorted(keys(action.type)),
        }
        for key, action in actions.items()
    ]


def keys(kind: Any) -> set[str]:
    """The fields of the configuration class that a flag's JSON becomes."""
    found: set[str] = set()
    for inner in getattr(kind, "__defaults__", None) or ():
        fields = getattr(inner, "__dataclass_fields__", {}).values()
        found |= {one.name for one in fields if one.init and "ClassVar" not in str(one.type)}
    for cell in getattr(kind, "__closure__", None) or ():
        if callable(cell.cell_contents):
            found |= keys(cell.cell_contents)
    return found


def takes(parser: argparse.ArgumentParser, action: argparse.Action, value: str) -> bool:
    """Whether the parser takes one word as this flag's value, its choices aside."""
    try:
        parser._get_value(action, value)
    except Exception:
        return False
    return True


def complaint(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """The parser's complaint about a command line; empty where it takes it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def place() -> Any:
    """The module that has the parser."""
    for name in PLACES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):  # something else is missing
                raise
    raise ModuleNotFoundError(" or ".join(PLACES))


def main() -> int:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.argv = ["vllm", "serve"]
    with tempfile.TemporaryDirectory() as scratch:
        probe = dispatch_device.Probe.of(request)
        kept = dispatch_device.prepare(request, probe, scratch)
        rest = Rest()
        sys.meta_path.append(rest)
        argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
        parser = place().make_arg_parser(argparse_utils.FlexibleArgumentParser(prog="vllm serve"))
        reasoning = importlib.import_module("vllm.reasoning").ReasoningParserManager
        tools = importlib.import_module("vllm.tool_parsers").ToolParserManager
        result = {
            "flags": flags(parser, request.get("tried", [])),
            "complaints": [complaint(parser, words) for words in request.get("lines", ())],
            "variables": sorted(importlib.import_module("vllm.envs").environment_variables),
            "reasoning": sorted(reasoning.list_registered()),
            "tools": sorted(tools.list_registered()),
            "empty": rest.made,
        }
        del kept
    json.dump(result, out)
    out.write("\n")
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
