"""What a log shows, as values: findings of the catalogue, failures outside it, the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from builder.diagnose.dispatch import Selection

DIAGNOSE_SCHEMA = 1
#: The id of a failure that no entry explains.
UNKNOWN = "not-in-catalogue"


class Finding(NamedTuple):
    """One thing that a log shows, the line that shows it, and what to do about it."""

    id: str
    severity: str
    line: int
    message: str
    fix: str
    file: str = ""
    #: the line itself
    quote: str = ""
    #: certain, likely, reported; empty for what is not in the catalogue
    sure: str = ""
    #: where cause or cure was published
    link: str = ""
    #: the line before it that matters, and its number
    before: str = ""
    before_line: int = 0
    #: the innermost frame that tells something
    frame: str = ""
    #: what to put into a search field
    search: str = ""
    #: which process or rank wrote it
    process: str = ""
    #: what the exception became
    became: tuple[str, ...] = ()
    #: further lines of the message
    more: tuple[str, ...] = ()
    #: MM-DD HH:MM:SS, where the log tells
    when: str = ""
    #: it only follows from the death of another process
    follows: bool = False


class Verdict(NamedTuple):
    """The one sentence: ``failed``, ``ready``, ``stopped``, ``unclear`` or ``empty``."""

    state: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a log says.  ``vllm`` is empty when neither the log nor the caller tells."""

    vllm: str
    tensorrt_llm: str
    #: every vLLM release that the log names, more than one after an upgrade in place
    releases: tuple[str, ...]
    lines: int
    dispatch: tuple[Selection, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    #: which program wrote it; empty when nothing tells
    engine: str = ""
    #: what a build calls itself that is no release (``0.1.dev1+gabc``)
    build: str = ""
    #: the line that says that the server is ready; 0 for none
    ready: int = 0
    file: str = ""

    @property
    def failed(self) -> bool:
        """Whether it shows a failure, or a start that does not finish."""
        return self.verdict.state in ("failed", "stopped")

    def in_file(self, name: str) -> Diagnosis:
        """The same, as one of several logs."""
        named = tuple(finding._replace(file=name) for finding in self.findings)
        return replace(self, file=name, findings=named)

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints."""
        return {
            "schema": DIAGNOSE_SCHEMA,
            "vllm": self.vllm,
            "tensorrt_llm": self.tensorrt_llm,
            "engine": self.engine,
            "build": self.build,
            "lines": self.lines,
            "ready_line": self.ready,
            "verdict": self.verdict._asdict(),
            "dispatch": [chosen._asdict() for chosen in self.dispatch],
            "findings": [
                {
                    **finding._asdict(),
                    "became": list(finding.became),
                    "more": list(finding.more),
                }
                for finding in self.findings
            ],
        }
