"""Environment variables: those that vLLM reads, and defaults that a tree sets."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.text import lines_of

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PTH = "spark_build_env.pth"


@dataclass(frozen=True)
class EnvReader:
    """The variables that a module reads: name -> accepted values, or None for any value."""

    known: Mapping[str, tuple[str, ...] | None]


def read_envs(source: str) -> EnvReader:
    """Read vLLM's ``envs.py``: keys of ``environment_variables``, and the choices of each."""
    known: dict[str, tuple[str, ...] | None] = {}
    lines = lines_of(source)
    for node in ast.parse(source).body:
        target: ast.expr | None = None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        is_table = isinstance(target, ast.Name) and target.id == "environment_variables"
        if not is_table or not isinstance(node.value, ast.Dict):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                text = lines[value.lineno - 1 : value.end_lineno]
                listed = any("_with_choices" in line for line in text)
                known[key.value] = _choices(value) if listed else None
    return EnvReader(known)


def _choices(value: ast.expr) -> tuple[str, ...] | None:
    for call in ast.walk(value):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name not in ("env_with_choices", "env_set_with_choices", "env_list_with_choices"):
            continue
        for argument in call.args:
            if isinstance(argument, (ast.List, ast.Tuple)):
                items = [e.value for e in argument.elts if isinstance(e, ast.Constant)]
                return tuple(str(item) for item in items)
    return None


def env_pth(env: Mapping[str, str]) -> bytes:
    """A ``.pth`` line that sets defaults in every Python process of this environment.

    A mod cannot export a variable into a server that starts later, and a virtual environment has
    no image ENV; this works for both.  A variable that is already set takes precedence.
    """
    pairs = repr(dict(sorted(env.items())))
    return f"import os; [os.environ.setdefault(k, v) for k, v in {pairs}.items()]\n".encode()
