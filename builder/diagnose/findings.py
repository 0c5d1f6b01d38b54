"""The values of a diagnosis: findings of the catalogue, other failures, the verdict."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from builder.diagnose.entries import Severity
from builder.util.documents import Count, Part, Text, always

if TYPE_CHECKING:
    from builder.diagnose.dispatch import Selection

#: The ID of a failure without an entry.
UNKNOWN = "not-in-catalogue"


class Finding(Part, frozen=True):
    """One finding, its log line, and the fix."""

    id: Text
    severity: Severity
    line: Count
    message: Text
    fix: str
    file: Annotated[str, Meta(description="the log it is in; empty for a single one")] = always("")
    quote: Annotated[str, Meta(description="the line itself")] = always("")
    sure: Annotated[
        str,
        Meta(
            description="how certain the cause is: certain, likely, reported; empty if not in "
            "the catalogue"
        ),
    ] = always("")
    link: Annotated[str, Meta(description="where the cause or fix was published")] = always("")
    before: Annotated[str, Meta(description="the relevant line before it")] = always("")
    before_line: Count = always(0)
    frame: Annotated[str, Meta(description="the innermost relevant frame")] = always("")
    search: Annotated[str, Meta(description="what to put into a search field")] = always("")
    process: Annotated[str, Meta(description="which process or rank wrote it")] = always("")
    became: Annotated[
        tuple[str, ...], Meta(description="the exceptions that were raised from it")
    ] = always(())
    more: Annotated[tuple[str, ...], Meta(description="further lines of the message")] = always(())
    when: Annotated[str, Meta(description="MM-DD HH:MM:SS, if the log has it")] = always("")
    follows: Annotated[bool, Meta(description="only a consequence of another process's exit")] = (
        always(False)
    )


class Verdict(Part, frozen=True):
    """The summary of a log, in one sentence."""

    state: Literal["failed", "ready", "stopped", "unclear", "empty"]
    sentence: Text


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a log.  ``vllm`` is empty if unknown."""

    vllm: str
    tensorrt_llm: str
    #: every vLLM release that the log names, more than one after an upgrade in place
    releases: tuple[str, ...]
    lines: int
    dispatch: tuple[Selection, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    #: the program that wrote it; empty if unknown
    engine: str = ""
    #: the version of a build that is not a release (``0.1.dev1+gabc``)
    build: str = ""
    #: the line where the server became ready, or 0
    ready: int = 0
    file: str = ""
    #: whether anything in it is as in the log of a server
    is_log: bool = True

    @property
    def failed(self) -> bool:
        """Whether it shows a failure or an incomplete start."""
        return self.verdict.state in ("failed", "stopped")

    def in_file(self, name: str) -> Diagnosis:
        """The same, for one of several logs."""
        named = tuple(replace(finding, file=name) for finding in self.findings)
        return dataclasses.replace(self, file=name, findings=named)
