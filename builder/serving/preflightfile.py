"""What preflight reads and writes: a question from a file, and the page of an answer.

A serve command, a compose file, a manifest or a recipe says which model, flags, variables and
image; options of the command line go before them.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.errors import UsageError
from builder.layers.shell import UNKNOWN
from builder.proof.flags import WHY, flag_groups, names_code
from builder.proof.report import now, render_page
from builder.proof.variables import is_read
from builder.proof.wholemodel import is_path, sentence
from builder.serving.checkpoint import refuse_gguf
from builder.serving.lint import READS, RELEASED_IMAGE, Linter, read_file, serve_commands
from builder.serving.loading import loading_words
from builder.serving.memory import GIB
from builder.serving.preflight import (
    ModelMatrix,
    PreflightRequest,
    gibibytes,
    in_short,
    layers_to_show,
    with_flags,
)
from builder.serving.released import release_base
from builder.serving.serveflags import name_of, of_plugins

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

    from builder.serving.commands import ServeCommand
    from builder.serving.options import Given
    from builder.serving.preflight import Preflight


#: A file and the line of one of its commands.
_AT_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)")
#: The name of a command that is given as a text.
_TEXT = "the command"


def request_of(given: Given) -> PreflightRequest:
    """What to ask.

    Raises:
        UsageError: it is not clear which model or which release is meant.
    """
    if given.model == "vllm" and given.flags[:1] == ("serve",):
        return _of_command(given, _chosen(_TEXT, shlex.join([given.model, *given.flags]), None))
    refuse_gguf(given.model)
    text = _text(given.model)
    if text is None:
        if given.checkpoint is not None:
            raise UsageError(
                f"--checkpoint stands for the model that a file names, and {given.model} is a "
                "model itself",
                hint=f"spark-build preflight {given.checkpoint}",
            )
        return _request(given, given.model, given.flags, given.variables, add_share=True)
    return _of_command(given, _chosen(*text))


def _text(model: str) -> tuple[str, str, int | None] | None:
    """The name, text and line of a file with commands, or of a command; None for a model."""
    path = Path(model)
    at_line = _AT_LINE.fullmatch(model)
    if model == "-" or (_is_file(path) and path.name != "config.json"):
        return model, read_file(path), None
    if at_line and _is_file(Path(at_line["file"])):
        return at_line["file"], read_file(Path(at_line["file"])), int(at_line["line"])
    if re.search(r"\s", model) and not is_path(model):
        return _TEXT, model, None
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _chosen(name: str, text: str, line: int | None) -> ServeCommand:
    """The serve command of a text; on a line, if there are several.

    Raises:
        UsageError: it has none, or several that differ.
    """
    commands = serve_commands(name, text)
    if line is not None:
        commands = [one for one in commands if one.line == line]
    if not commands:
        at = f" on line {line}" if line is not None else ""
        raise UsageError(f"{name} contains no vllm serve command{at}", hint=READS)
    asked = {(tuple(w.text for w in one.words), one.env, one.image): one for one in commands}
    if len(asked) > 1:
        lines = ", ".join(f"{one.line} ({one.model or 'no model'})" for one in asked.values())
        raise UsageError(
            f"{name} has {len(asked)} different serve commands, on lines {lines}",
            hint=f"spark-build preflight {name}:{next(iter(asked.values())).line}",
        )
    return commands[0]


def _of_command(given: Given, command: ServeCommand) -> PreflightRequest:
    words = [word.text for word in command.words]
    model = command.model
    if words[:1] == [model]:
        del words[0]
    elif "--model" in words:
        at = words.index("--model")
        del words[at : at + 2]
    groups = [] if given.model == "vllm" else flag_groups(words)
    unknown = [group for group in groups if any(UNKNOWN in word for word in group)]
    for group in unknown:
        console.warn(f"{group[0]} is left out: its value is known only when the command is run")
    strange = [group for group in groups if group not in unknown and names_code(group)]
    plugged = of_plugins({name_of(group) for group in strange})
    strange += [group for group in groups if name_of(group) in plugged]
    for group in strange:
        console.warn(f"{group[0]} is left out: {WHY}, and nothing of a file's is run or read")
    own = tuple(w for group in groups if group not in (*unknown, *strange) for w in group)
    flags = own if groups else tuple(words)
    if given.model != "vllm":
        flags = with_flags(given.flags, flags)
    variables = tuple(
        f"{one.name}={one.value}"
        for one in command.env
        if is_read(one.name) and UNKNOWN not in one.value
    )
    model = str(given.checkpoint) if given.checkpoint is not None else model
    if not model or UNKNOWN in model:
        raise UsageError(
            f"{command.file}:{command.line}: the model is known only when the command is run",
            hint="--checkpoint DIR",
        )
    if is_path(model) and not Path(model).exists():
        raise UsageError(
            f"{command.file}:{command.line}: its model {model} is not a folder here",
            hint="--checkpoint DIR",
        )
    asked = (*variables, *given.variables)
    request = _request(_with_release(given, command), model, flags, asked)
    return replace(request, left_out=tuple(f"{group[0]} ({WHY})" for group in strange))


def _with_release(given: Given, command: ServeCommand) -> Given:
    """The same, with the image, release and profile of a command where the options name none."""
    if given.release or given.plan.base or (given.releases is not None):
        return given
    official = RELEASED_IMAGE.search(command.image)
    release = official[1] if official else command.vllm
    base = None if release else command.image or None
    profile = "" if base else Linter().profile(command)
    layers = given.plan.layers or ((profile,) if profile else ())
    return replace(
        given, release=release or None, plan=replace(given.plan, base=base, layers=layers)
    )


def _request(
    given: Given,
    model: str,
    flags: tuple[str, ...],
    variables: Sequence[str],
    *,
    add_share: bool = False,
) -> PreflightRequest:
    """The request; its base is empty where ``--releases`` names several.

    Raises:
        UsageError: the options name no vLLM, or several.
    """
    base = given.plan.base
    if (given.releases is not None) + (given.release is not None) + (base is not None) != 1:
        many = given.release is not None or base is not None
        raise UsageError(
            "preflight asks the vLLM of --release, --base or --releases: "
            f"{'only one of them' if many else 'one of them is needed'}",
            hint="--release 0.33.0",
        )
    ref = release_base(given.release) if given.release is not None else base
    return PreflightRequest(
        model=model, plan=replace(given.plan, base=ref), flags=tuple(flags),
        variables=tuple(variables), typed=given.variables, models=given.models,
        profiles=given.profiles, add_share=add_share, memory=_bytes(given.memory), assume=True,
    )  # fmt: skip


def _bytes(memory: str | None) -> int | None:
    """Memory in bytes.

    Raises:
        UsageError: it is no number, or no machine has so much or so little.
    """
    if memory is None:
        return None
    size = float(memory) if re.fullmatch(r"\d{1,4}(\.\d{1,3})?", memory) else 0.0
    if not _LEAST_GIB <= size <= _MOST_GIB:
        raise UsageError(
            f"--memory {memory!r} is not the memory of a machine in GiB", hint="--memory 121.69"
        )
    return int(size * GIB)


#: Memory of a machine that can be meant, in GiB.
_LEAST_GIB, _MOST_GIB = 8, 4096


# ---------------------------------------------------------------------------- the page of an answer


def preflight_page(document: Preflight | ModelMatrix, when: datetime.datetime | None = None) -> str:
    """A page for people; everything from the release and the model is escaped."""
    served = document.model if isinstance(document, ModelMatrix) else document.served
    command = shlex.join(["vllm", "serve", served, *document.flags])
    page = {
        "model": document.model, "made": when or now(), "command": command, "gib": gibibytes,
        "assumed": document.assumed,
    }  # fmt: skip
    if isinstance(document, ModelMatrix):
        more = {"rows": document.rows, "starting": document.starting, "layers": document.layers}
        return render_page("preflight.html.j2", document=None, **page, **more)
    shown = layers_to_show(document.layers)
    variables = [f"{name}={value}" for name, value in document.environment.items()]
    page["command"] = "\n".join([*map(shlex.quote, variables), command])
    memory = document.memory
    sizes = (memory.weight_bytes, memory.overhead_bytes, memory.cache_bytes) if memory else ()
    return render_page(
        "preflight.html.j2", document=document, **page, memory=memory, shown=shown,
        loading=tuple(loading_words(document.loading)),
        refusal=sentence(document.refusal) if document.refusal else "",
        short=in_short("", document), rows=document.choices,
        rest=sum(row.count for row in document.layers) - sum(row.count for row in shown),
        parts=[(name, max(size, 0)) for name, size in zip(_PARTS, sizes, strict=False)],
    )  # fmt: skip


#: The parts of the memory, as classes of the page.
_PARTS = ("weights", "overhead", "caches")
