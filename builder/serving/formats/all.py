"""The formats by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.errors import UsageError, did_you_mean
from builder.serving.formats import compose, docker, kubernetes, launchers, shell

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.serving.documents import Recipe

#: The formats by name, with the function that renders the files.
FORMATS: dict[str, Callable[[Recipe], dict[str, str]]] = {
    "docker": docker.render,
    "compose": compose.render,
    "sparkrun": launchers.sparkrun,
    "eugr": launchers.eugr,
    "kubernetes": kubernetes.render,
    "shell": shell.render,
}


#: Formats of tools that find the nodes of a model themselves.
LAUNCHERS = ("sparkrun", "eugr")
#: TensorRT-LLM's format, which needs only the model.
TRTLLM = "trtllm"


def refuse_format(form: str) -> None:
    """Refuse an unknown format, before anything is read.

    Raises:
        UsageError: it is not.
    """
    if form not in FORMATS:
        known = (*FORMATS, TRTLLM)
        raise UsageError(
            f"unknown format {form!r}{did_you_mean(form, known)} (known: {', '.join(known)})",
            hint=f"--format {known[0]}",
        )


def refuse_topology(form: str, topology: str) -> None:
    """Refuse a topology that a format cannot express, before anything is read or asked for.

    Raises:
        UsageError: it cannot.
    """
    if form in LAUNCHERS:
        launchers.refuse_topology(topology, form)
    elif form == "kubernetes":
        kubernetes.refuse_topology(topology)


def rendered(recipe: Recipe, form: str) -> dict[str, str]:
    """The files of a format, the main one first.

    Raises:
        UsageError: there is no such format, or it cannot express this recipe.
    """
    refuse_format(form)
    return FORMATS[form](replace(recipe, made_by=f"{recipe.made_by} --format {form}"))
