"""Applies ``--set`` to a recipe."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import counted
from builder.common.hints import in_place_of, instead
from builder.errors import UsageError
from builder.serving.documents import PluginFile, Setting
from builder.serving.interface import PLUGINS, canonical
from builder.serving.kinds import (
    EXPERTS,
    LINEAR,
    LINEAR_BACKEND,
    MOE_BACKEND,
    experts_refusal,
    linear_refusal,
)
from builder.serving.memory import UTILIZATION
from builder.serving.memorydocuments import fraction_refusal
from builder.serving.reciperequest import SET
from builder.serving.replaced import replaced

if TYPE_CHECKING:
    from builder.serving.recipedraft import Draft

#: The folder in the container for files that a recipe mounts.
PLUGIN_FOLDER = "/app"
#: Flags that name a file (vllm/entrypoints/openai/cli_args.py).
FILES = (*PLUGINS.values(), "--chat-template")
#: Characters of a chat template itself, which is no name of a file then.
_INLINE = set("{}\n")
#: Flags whose values a recipe repeats elsewhere: in ports, probes and the router's file.
_OWN_OPTIONS = {
    "--host": "edit the file: containers publish the port of 0.0.0.0",
    "--model": "spark-build models list",
    "--served-model-name": "edit the file, also where clients and LiteLLM name the model",
}
_PORT = "--port"
_PORTS = re.compile(r"[1-9][0-9]{0,3}|[1-5][0-9]{4}")
#: Flags whose product is the number of GPUs (vllm/config/parallel.py), and the topology with two.
_SIZES = {
    "--tensor-parallel-size": "tp2", "--pipeline-parallel-size": "tp2",
    "--data-parallel-size": "two-solos",
}  # fmt: skip
_GPUS = {"solo": 1, "two-solos": 1, "tp2": 2, "tp2-ray": 2}


def choose(draft: Draft, text: str) -> None:
    """Apply one ``--set``: a flag, a variable, or an empty value to remove one.

    Raises:
        UsageError: the release does not know it and has no replacement.
    """
    name = text.partition("=")[0]
    if name.isupper() or name.startswith("VLLM_"):
        _choose_variable(draft, text)
    else:
        _choose_flag(draft, text)


def _choose_variable(draft: Draft, text: str) -> None:
    name, equals, value = text.partition("=")
    if equals and not value:
        draft.env.pop(name, None)
        return
    if not equals:
        raise UsageError(f"--set {text}: a variable needs a value", hint=f"--set {name}=1")
    other = replaced().get(name)
    why = draft.request.served.interface.variable_refusal(name, value)
    if why and (other is None or other.flag_refusal(draft.request.served.interface, value)):
        hint = f"--set {other.flag.removeprefix('--')}=VALUE" if other else ""
        raise UsageError(f"--set {text}: {why}", hint=hint)
    draft.variable(name, value, SET)


def _choose_flag(draft: Draft, text: str) -> None:
    name, equals, value = text.partition("=")
    flag = _flag(text)
    if flag in _OWN_OPTIONS or flag == _PORT:
        port = value if _PORTS.fullmatch(value) else str(draft.request.port)
        raise UsageError(
            f"--set {text}: it cannot be set here, because other parts of the recipe repeat it",
            hint=_OWN_OPTIONS.get(flag) or in_place_of(SET, text, _PORT, port),
        )
    known = draft.request.served.interface.flag(flag.partition(".")[0])
    key = known.names[0] if known is not None and "." not in flag else flag
    if equals and not value:
        if draft.flags.pop(key, None) is None:
            raise UsageError(f"--set {text}: the recipe has no {flag} to remove")
        return
    why = draft.request.served.interface.refusal(flag, value if equals else None)
    if why:
        raise UsageError(f"--set {text}: {why}")
    if key == UTILIZATION and (why := fraction_refusal(value)):
        raise UsageError(f"--set {text}: {why}", hint=instead(text, f"{name}=0.85"))
    _refuse_backend(draft, text, key, value)
    if value and key in FILES:
        value = _mounted(draft, text, key, value)
    draft.left_out = [one for one in draft.left_out if one.name != key]
    draft.flags[key] = Setting(name=flag, value=value if equals else None, origin=SET)


def _refuse_backend(draft: Draft, text: str, key: str, value: str) -> None:
    """Refuse a backend that does not suit the model.

    Raises:
        UsageError: vLLM refuses it for the model's layers, or has no kernel for them.
    """
    model = draft.request.model
    why = ""
    # an unknown activation is no reason to refuse what the user knows
    if key == MOE_BACKEND and (model.experts is not None or not model.kinds() & EXPERTS):
        why = experts_refusal(draft.request, value) if model.kinds() else ""
    # with another backend, vLLM may select another kernel for FP8 and W4A16 layers too
    if key == LINEAR_BACKEND and model.kinds() and not model.kinds() & LINEAR:
        why = linear_refusal(model, value)
    if why:
        raise UsageError(f"{SET} {text}: {why}", hint=f"leave {SET} {text} out")


def _mounted(draft: Draft, text: str, key: str, value: str) -> str:
    """The path of a file in the container; mounts it there if it is one of this machine.

    Raises:
        UsageError: it is a folder.
    """
    there = Path(value)
    if there.is_dir():
        raise UsageError(f"{SET} {text}: {value} is a folder", hint=f"{SET} {key[2:]}=FILE")
    here = there.is_file()
    if not here and (there.is_absolute() or key not in PLUGINS.values()):
        if not set(value) & _INLINE:
            draft.notes.append(f"{value} is not on this machine: the image must have it")
        return value
    host = value if there.is_absolute() else f"./{there.as_posix()}"
    path = f"{PLUGIN_FOLDER}/{there.name}"
    draft.plugins = [plugin for plugin in draft.plugins if plugin.path != path]
    draft.plugins.append(PluginFile(name=there.name, path=path, host=host, chosen=True))
    return path


def _flag(text: str) -> str:
    name = text.partition("=")[0]
    return canonical(name if name.startswith("-") else f"--{name}")


def chosen_as(draft: Draft, setting: Setting) -> str:
    """The word of ``--set`` that a setting comes from."""
    return next(c for c in reversed(draft.request.chosen) if _flag(c) == setting.name)


def refuse_gpus(draft: Draft) -> None:
    """Refuse chosen sizes that need more GPUs than one server of the topology has.

    Raises:
        UsageError: they do; vLLM would not start.
    """
    sizes = {n: draft.flags[n] for n in _SIZES if n in draft.flags}
    numbers = [int(one.value or "") for one in sizes.values() if (one.value or "").isdecimal()]
    needed, there = math.prod(numbers), _GPUS[draft.request.place.topology]
    for name, one in sizes.items():
        if one.origin != SET or one.value == "1" or needed <= there:
            continue
        text = chosen_as(draft, one)
        more = () if there > 1 else ("--topology", _SIZES[name])
        raise UsageError(
            f"--set {text}: that needs {needed} GPUs, and topology "
            f"{draft.request.place.topology} has {counted(there, 'GPU')} for a server",
            hint=in_place_of(SET, text, *more),
        )


def refuse_parsers(draft: Draft) -> None:
    """Refuse a chosen parser that the release lacks, unless its plugin was chosen too.

    Raises:
        UsageError: there is one.
    """
    model, interface = draft.request.model, draft.request.served.interface
    brought = {c.name for c in (*model.reasoning_parsers, *model.tool_parsers) if c.plugin}
    for flag, plugin in PLUGINS.items():
        chosen, with_plugin = draft.flags.get(flag), draft.flags.get(plugin)
        value = chosen.value if chosen is not None and chosen.origin == SET else None
        if value is None or (with_plugin is not None and (
            with_plugin.origin == SET or value in brought
        )):  # fmt: skip
            continue
        if why := interface.parser_refusal(flag, value):
            raise UsageError(
                f"--set {flag.removeprefix('--')}={value}: {why}; built in: "
                f"{', '.join(interface.parsers(flag))}; {plugin} names a file with your own",
                hint=f"--set {plugin.removeprefix('--')}=FILE",
            )
