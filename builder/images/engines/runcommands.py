"""The commands that run a built image: ``docker run``, and the commands before it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.common.document import Part, Text
from builder.images.engines.oci import Overlay, overlay_of

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.plan import BuildPlan
    from builder.images.engines.model import BuiltImage

#: Options for GPU access, shared memory for vLLM's processes, and models on the host.
RUN = (
    "docker run --rm --gpus all --ipc host -p 8000:8000 "
    "-v ~/.cache/huggingface:/root/.cache/huggingface --entrypoint vllm"
)


class RunBlock(Part, frozen=True, kw_only=True):
    """How to start vLLM in the built image: ``before`` once, then ``command``."""

    before: Annotated[
        tuple[Text, ...], Meta(description="commands that make or fetch the image first")
    ]
    command: Text
    serve: Annotated[
        Text, Meta(description="the same inside a container, or where vLLM is installed")
    ]
    moe_flags: Annotated[
        tuple[Text, ...],
        Meta(description="additional flags for MoE models that the profile supports"),
    ]
    env: Annotated[dict[str, str], Meta(description="what the image sets")]
    dockerfile: Annotated[
        Text,
        Meta(description="where the Dockerfile that puts an overlay onto its image was written"),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class RunCommands:
    """The commands to run an image, with a title for each."""

    block: RunBlock
    overlay: Overlay | None = None

    def text(self) -> str:
        """The block as text."""
        lines: list[str] = []
        block = self.block
        if self.overlay is not None:
            lines += [
                "This is an overlay: it has only the changed files and cannot run alone.",
                f"The image consists of {self.overlay.base} and the overlay:",
                *(f"    {command}" for command in block.before),
            ]
            if not block.dockerfile:
                lines += ["", *(f"    {line}" for line in self.overlay.dockerfile.splitlines())]
        elif block.before:
            lines += ["Copy it to the Spark:", *(f"    {command}" for command in block.before)]
        lines += ["Run it:", f"    {block.command}"]
        if block.moe_flags:
            lines.append(f"  MoE models that the profile supports: add {' '.join(block.moe_flags)}")
        if block.env:
            settings = " ".join(f"{name}={value}" for name, value in sorted(block.env.items()))
            lines.append(f"  The image sets: {settings}")
        return "\n".join(lines)


def serve_line(plan: BuildPlan) -> str:
    """``vllm serve MODEL`` with the flags that the profile needs on this release."""
    return shlex.join(["vllm", "serve", "MODEL", *plan.serve_flags])


def run_commands(
    plan: BuildPlan, built: BuiltImage, dockerfile: Path | None = None, name: str = ""
) -> RunCommands:
    """The commands that start vLLM in the built image.

    ``dockerfile`` builds the image of an overlay, and ``name`` is the name of that image, if it was
    given; of an overlay in a registry it is that of the overlay itself.
    """
    overlay = overlay_of(plan, built) if plan.base.is_wheels else None
    if overlay is not None and name and built.ref.in_layout:
        overlay = overlay.named(name)
    image = built.subject.place
    before: tuple[str, ...] = ()
    if overlay is not None:
        image = overlay.image
        before = (overlay.command(dockerfile),)
    elif built.ref.in_layout:
        image = built.name
        brought = ["spark-build", "distribute", built.pinned, "SPARK", "--tag", image]
        before = (shlex.join(brought),)
    serve = serve_line(plan)
    block = RunBlock(
        before=before,
        command=f"{RUN} {shlex.quote(image)} {serve.removeprefix('vllm ')}",
        serve=serve,
        moe_flags=tuple(plan.moe_serve_flags),
        env=dict(plan.env),
        dockerfile=str(dockerfile or ""),
    )
    return RunCommands(block=block, overlay=overlay)
