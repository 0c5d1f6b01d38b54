"""What the probes reply, read out of their JSON."""

from __future__ import annotations

from builder.runtime.dispatch_expect import Answer, Failure
from builder.util.documents import Part


class DispatchReply(Part, frozen=True, kw_only=True):
    """What vLLM answered to the dispatch probe's questions."""

    #: in the order of the request's ``ask``
    answers: tuple[Answer, ...] = ()
    #: one for each choice that the release offers, of the kinds in the request's ``choices``
    choices: tuple[Answer, ...] = ()
    #: parts that were put in place of real ones
    simulated: tuple[str, ...] = ()
    #: vLLM's extension modules that were really loaded
    real: tuple[str, ...] = ()
    #: why nothing could be asked
    fatal: Failure | None = None
