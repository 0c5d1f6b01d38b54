"""How an image that was built is started: the ``docker run`` line, and what comes before it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from builder.engines.overlay import Overlay, overlay_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.engines.model import BuiltImage
    from builder.model import BuildPlan

#: The container sees the GPU, vLLM's processes share memory, and models stay on the host.
RUN = (
    "docker run --rm --gpus all --ipc host -p 8000:8000 "
    "-v ~/.cache/huggingface:/root/.cache/huggingface --entrypoint vllm"
)


@dataclass(frozen=True, kw_only=True)
class RunCommands:
    """What a new owner types, in this order: ``before`` once, then ``command``."""

    #: commands that make or fetch the image, where ``docker run`` cannot take what was built
    before: tuple[str, ...]
    command: str
    #: the same inside a container, or where vLLM is installed
    serve: str
    #: what MoE models that the profile supports take besides
    moe_flags: tuple[str, ...]
    #: variables that the image sets for this release
    env: Mapping[str, str] = field(default_factory=dict)
    overlay: Overlay | None = None
    dockerfile: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """The block in the document of ``image``."""
        value: dict[str, Any] = {
            "before": list(self.before),
            "command": self.command,
            "serve": self.serve,
            "moe_flags": list(self.moe_flags),
            "env": dict(self.env),
        }
        if self.dockerfile is not None:
            value["dockerfile"] = str(self.dockerfile)
        return value

    def text(self) -> str:
        """The block for people."""
        lines: list[str] = []
        if self.overlay is not None:
            lines += [
                "This is an overlay: the changed files alone. It does not run by itself.",
                f"The image is made of {self.overlay.base} and the overlay:",
                *(f"    {command}" for command in self.before),
            ]
            if self.dockerfile is None:
                lines += ["", *(f"    {line}" for line in self.overlay.dockerfile.splitlines())]
        elif self.before:
            lines += ["Bring it to the Spark:", *(f"    {command}" for command in self.before)]
        lines += ["Run it:", f"    {self.command}"]
        if self.moe_flags:
            lines.append(f"  MoE models that the profile supports: add {' '.join(self.moe_flags)}")
        if self.env:
            settings = " ".join(f"{name}={value}" for name, value in sorted(self.env.items()))
            lines.append(f"  The image sets: {settings}")
        return "\n".join(lines)


def serve_line(plan: BuildPlan) -> str:
    """``vllm serve MODEL`` with the flags that the profile needs on this release."""
    return shlex.join(["vllm", "serve", "MODEL", *plan.serve_flags])


def run_commands(plan: BuildPlan, built: BuiltImage, dockerfile: Path | None = None) -> RunCommands:
    """What starts vLLM with what was built; ``dockerfile`` is where the overlay's was written."""
    overlay = overlay_of(plan, built) if plan.base.kind == "pypi" else None
    image = (built.target or built.ref).removeprefix("docker://")
    before: tuple[str, ...] = ()
    if overlay is not None:
        image = overlay.image
        before = (overlay.command(dockerfile),)
    elif built.ref.startswith("oci:"):
        image = built.name
        brought = ["spark-build", "distribute", built.pinned, "SPARK", "--tag", image]
        before = (shlex.join(brought),)
    serve = serve_line(plan)
    return RunCommands(
        before=before,
        command=f"{RUN} {shlex.quote(image)} {serve.removeprefix('vllm ')}",
        serve=serve,
        moe_flags=tuple(plan.moe_serve_flags),
        env=plan.env,
        overlay=overlay,
        dockerfile=dockerfile,
    )
