"""The answer of preflight as a self-contained HTML page, without scripts, fonts or other files."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder.proof.report import now, render_page
from builder.proof.wholemodel import sentence
from builder.serving.preflight import ModelMatrix, gibibytes, in_short, layers_to_show

if TYPE_CHECKING:
    import datetime

    from builder.serving.preflight import Preflight


def preflight_page(document: Preflight | ModelMatrix, made: datetime.datetime | None = None) -> str:
    """A page for people; everything from the release and the model is escaped."""
    command = shlex.join(["vllm", "serve", document.model, *document.flags])
    page = {"model": document.model, "made": made or now(), "command": command, "gib": gibibytes}
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
        refusal=sentence(document.refusal) if document.refusal else "",
        short=in_short("", document), rows=document.choices,
        rest=sum(row.count for row in document.layers) - sum(row.count for row in shown),
        parts=[(name, max(size, 0)) for name, size in zip(_PARTS, sizes, strict=False)],
    )  # fmt: skip


#: The parts of the memory, as classes of the page.
_PARTS = ("weights", "overhead", "caches")
