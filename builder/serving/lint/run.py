"""Lints files: finds their serve commands, the release of each, and what is wrong."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from builder.common.hints import again, reason
from builder.errors import NotServed, UsageError
from builder.layers.catalog import Catalog
from builder.serving.interface import interface_of
from builder.serving.lint.checks import Checked, check
from builder.serving.lint.readers import open_quotes, read_commands
from builder.serving.lint.rules import RULES, Finding, LintReport
from builder.serving.profile import patched_interface
from builder.serving.release import release_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.serving.interface import ServeInterface
    from builder.serving.lint.commands import ServeCommand
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
_LEAST_BUSY = re.compile(r"routing[_-]strategy['\"]?[:=\s]+['\"]?least-busy")
#: The first line of a file that ``recipe`` writes.
_MADE = re.compile(
    r"^# \S+ on vLLM (?P<vllm>\d[\w.+]*), profile (?P<profile>[\w.-]+), [\w-]+$", re.MULTILINE
)
#: Letters of a file in which that line is looked for.
_HEAD = 4096
#: Findings of a file that are listed, at most.
_MOST_FINDINGS = 1000


@dataclass
class Linter:
    """Reads each release from the package index or an image once."""

    release: str | None = None
    image: str | None = None
    _interfaces: dict[tuple[str, str], ServeInterface] = field(default_factory=dict)

    def interface(self, command: ServeCommand) -> ServeInterface:
        """The interface of a command's release.

        Raises:
            UsageError: neither the options nor the command's image name the release.
            SparkBuildError: it cannot be read.
        """
        named = _RELEASE.search(command.image)
        release = self.release or (named[1] if named and not self.image else "")
        release = release or ("" if self.image else command.vllm)
        ref = release_base(release) if release else self.image or ""
        if not ref:
            image = f"the image {command.image}" if command.image else "no image"
            raise UsageError(
                f"{command.file}:{command.line}: the vLLM release is unknown; the command "
                f"names {image} (--image IMAGE reads the release from an image)",
                hint=again("--release 0.33.0"),
            )
        profile = "" if self.image else self.profile(command)
        if (ref, profile) not in self._interfaces:
            self._interfaces[ref, profile] = self._read(ref, profile)
        return self._interfaces[ref, profile]

    def profile(self, command: ServeCommand) -> str:
        """The profile whose changes a command's vLLM has: of its mods, or of the file's recipe."""
        mods = {mod.rpartition("/")[2] for mod in command.mods}
        if not mods:
            return command.profile if command.profile in self._profiles else ""
        return next((name for name, mod in self._profiles.items() if mod in mods), "")

    @cached_property
    def _profiles(self) -> dict[str, str]:
        """Our profiles, with the name of each one's mod."""
        catalog = Catalog.discover()
        return {name: catalog.profile(name).mod for name in catalog.profile_files}

    def _read(self, ref: str, profile: str) -> ServeInterface:
        if profile:
            try:
                return patched_interface(profile, ref)
            except NotServed:  # its mod changes nothing there
                pass
        return interface_of(ref)


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
    skipped: list[str] = []
    cut: list[str] = []
    commands = ignored = 0
    for name, text in files:
        found = dict.fromkeys([*_least_busy(name, text), *_open_quotes(name, text)])
        served = _commands(name, text)
        commands += len(served)
        if not served and not found:
            skipped.append(name)
        for command in served:
            interface = linter.interface(command)
            releases.add(interface.vllm)
            # commands can share a line, such as an exported variable's, and repeat its findings
            checked = Checked.of(command, interface, known, profile=linter.profile(command))
            for finding in check(checked):
                found[finding] = None
                if len(found) > _MOST_FINDINGS:
                    break
        ignored_in = _Ignored(text)
        once = sorted(found, key=lambda finding: finding.line)
        kept = [finding for finding in once if not ignored_in.has(finding)]
        ignored += len(once) - len(kept)
        cut += [name] if len(once) > _MOST_FINDINGS else []
        findings += kept[:_MOST_FINDINGS]
    if len(skipped) == len(files):
        subject = skipped[0] if len(skipped) == 1 else f"none of {len(skipped)} files"
        found_in = "contains no" if len(skipped) == 1 else "contains a"
        raise UsageError(f"{subject} {found_in} vllm serve command", hint=READS)
    return LintReport(
        vllm=releases.pop() if len(releases) == 1 else "",
        files=tuple(name for name, _ in files),
        commands=commands,
        findings=tuple(findings),
        ignored=ignored,
        skipped=tuple(skipped),
        cut=tuple(cut),
    )


def _commands(name: str, text: str) -> list[ServeCommand]:
    """The serve commands of a file, with what its first line says, if ``recipe`` made it."""
    served = read_commands(name, text)
    made = _MADE.search(text[:_HEAD])
    if made is None:
        return served
    return [replace(one, vllm=made["vllm"], profile=made["profile"]) for one in served]


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
