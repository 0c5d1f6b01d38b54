"""Lints files: finds their serve commands, the release of each, and what is wrong."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.lint.checks import Checked, check
from builder.lint.readers import open_quotes, read_commands
from builder.lint.rules import RULES, Finding, LintReport
from builder.serving.interface import interface_of
from builder.serving.release import release_base
from builder.util.hints import reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.lint.commands import ServeCommand
    from builder.serving.interface import ServeInterface
    from builder.serving.models import Model, Models

#: The formats that ``lint`` reads.
READS = (
    "lint reads shell scripts, compose files, Kubernetes manifests, recipes of sparkrun and eugr, "
    "and Dockerfiles"
)
#: Bytes of a file, at most; scripts and manifests are far smaller.
_LARGEST = 1 << 20
_IGNORE = re.compile(r"#\s*spark-build:\s*ignore(?:\[([\w, -]+)\])?")
_ALL = "*"  # no rule's name
_RELEASE = re.compile(r"vllm/vllm-openai:v(\d+\.\d+\.\d+(?:\.post\d+|rc\d+)?)")
_LEAST_BUSY = re.compile(r"routing[_-]strategy['\"]?\s*[:=\s]\s*['\"]?least-busy")


@dataclass
class Linter:
    """Reads each release from the package index or an image once."""

    release: str | None = None
    image: str | None = None
    _interfaces: dict[str, ServeInterface] = field(default_factory=dict)

    def interface(self, command: ServeCommand) -> ServeInterface:
        """The interface of a command's release.

        Raises:
            UsageError: neither the options nor the command's image name the release.
            SparkBuildError: it cannot be read.
        """
        if self.release is not None:
            ref = release_base(self.release)
        elif self.image is not None:
            ref = self.image
        else:
            match = _RELEASE.search(command.image)
            if match is None:
                named = f"the image {command.image}" if command.image else "no image"
                raise UsageError(
                    f"{command.file}:{command.line}: the vLLM release is unknown; the command "
                    f"names {named} (--image IMAGE reads the release from an image)",
                    hint="--release 0.33.0",
                )
            ref = release_base(match[1])
        if ref not in self._interfaces:
            self._interfaces[ref] = interface_of(ref)
        return self._interfaces[ref]


def read_file(path: Path) -> str:
    """The text of a file; ``-`` is standard input.

    Raises:
        UsageError: it cannot be read, is not a text, or is too large.
    """
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(_LARGEST + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > _LARGEST or "\0" in text:
        what = "is larger than 1 MiB" if len(data) > _LARGEST else "is not a text file"
        raise UsageError(f"{path} {what}", hint=READS)
    return text


def lint(files: Sequence[tuple[str, str]], linter: Linter, models: Models) -> LintReport:
    """Lint files, given by name and text.

    Raises:
        UsageError: a file cannot be read, none has a serve command, or no release is named.
        SparkBuildError: the release cannot be read.
    """
    known = _by_id(models)
    findings: list[Finding] = []
    releases: set[str] = set()
    commands = ignored = 0
    for name, text in files:
        found = [*_least_busy(name, text), *_open_quotes(name, text)]
        broken = bool(found)
        served = read_commands(name, text)
        commands += len(served)
        for command in served:
            interface = linter.interface(command)
            releases.add(interface.vllm)
            found += check(Checked.of(command, interface, known))
        if not served and not broken:
            raise UsageError(
                f"{name} contains no vllm serve command",
                hint=READS,
            )
        ignored_in = _Ignored(text)
        # commands can share a line, such as an exported variable's, and then repeat its findings
        once = sorted(dict.fromkeys(found), key=lambda finding: finding.line)
        kept = [finding for finding in once if not ignored_in.has(finding)]
        ignored += len(once) - len(kept)
        findings += kept
    return LintReport(
        vllm=releases.pop() if len(releases) == 1 else "",
        files=tuple(name for name, _ in files),
        commands=commands,
        findings=tuple(findings),
        ignored=ignored,
    )


def _by_id(models: Models) -> dict[str, Model]:
    read = [models.model(name) for name in models.files]
    return {model.id.value: model for model in read}


def _least_busy(name: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if _LEAST_BUSY.search(line) and not line.lstrip().startswith("#"):
            rule = RULES["least-busy"]
            yield Finding(
                file=name, line=number, rule=rule.id, severity=rule.severity,
                message=rule.summary, help="routing_strategy: simple-shuffle",
            )  # fmt: skip


def _open_quotes(name: str, text: str) -> Iterator[Finding]:
    rule = RULES["open-quote"]
    for number in open_quotes(name, text):
        yield Finding(
            file=name, line=number, rule=rule.id, severity=rule.severity,
            message="the quote that begins here is not closed", help="close it",
        )  # fmt: skip


class _Ignored:
    """The findings that a file's comments switch off."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._off: dict[int, set[str]] = {}

    def has(self, finding: Finding) -> bool:
        """Whether a comment on this line, or alone on the line above, switches the rule off."""
        at = finding.line - 1
        if at not in self._off:
            self._off[at] = self._rules(at)
        return not self._off[at].isdisjoint({_ALL, finding.rule})

    def _rules(self, at: int) -> set[str]:
        """The rules named by comments near a line."""
        near = self._lines[at : at + 1]
        if 0 < at <= len(self._lines) and self._lines[at - 1].lstrip().startswith("#"):
            near = [*near, self._lines[at - 1]]
        found: set[str] = set()
        for line in near:
            match = _IGNORE.search(line)
            if match:
                found.update([_ALL] if match[1] is None else re.split(r"[,\s]+", match[1].strip()))
        return found
