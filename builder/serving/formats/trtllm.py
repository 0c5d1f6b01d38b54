"""TensorRT-LLM: ``trtllm-serve`` in its own image, with its file of options.

vLLM's profiles, releases and flags do not apply: only the model's file is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.serving.formats.common import CACHE, TOKEN, for_shell, yaml_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.serving.models import Model

OPTIONS = "trtllm-options.yaml"
#: The path of the options file in the container.
_PLACE = f"/app/{OPTIONS}"


def refuse_settings(given: Mapping[str, object]) -> None:
    """Refuse options that are about vLLM, by their names.

    Raises:
        UsageError: one of them is set.
    """
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise UsageError(
                f"{name} is for vLLM, and --format trtllm prints the model file's settings for "
                "TensorRT-LLM",
                hint=f"leave {name} out",
            )


def trtllm(model: Model, port: int) -> dict[str, str]:
    """A script with ``docker run``, and the file of options.

    Raises:
        UsageError: the model's file does not say how TensorRT-LLM serves it.
    """
    known = model.tensorrt_llm
    if known is None:
        raise UsageError(
            f"the file of {model.name} has no settings for TensorRT-LLM",
            hint="--format docker",
        )
    head = f"# {model.id.value} on TensorRT-LLM, {known.image}\n# source: {known.source}\n"
    words = ["docker", "run", "--rm", "--name", f"{model.name}-trtllm", "--gpus", "all"]
    words += ["--ipc", "host", "--publish", f"{port}:{port}", "--env", TOKEN]
    for name, value in known.variables.items():
        words += ["--env", f"{name}={value}"]
    serve = ["trtllm-serve", model.id.value, "--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    for name, value in known.flags.items():
        serve += [name, value] if value else [name]
    serve += ["--extra_llm_api_options", _PLACE]
    volumes = [
        f'--volume "$HOME/.cache/huggingface:{CACHE}"',
        f'--volume "$PWD/{OPTIONS}:{_PLACE}:ro"',
    ]
    command = " \\\n    ".join([for_shell(words), *volumes, for_shell([known.image, *serve])])
    return {
        "run.sh": f"#!/bin/sh\n{head}{command}\n",
        OPTIONS: head + yaml_text(known.options),
    }
