"""A ``vllm serve`` command in a file: its flags and variables, each with its line."""

from __future__ import annotations

import re
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.layers.conversion.shell import UNKNOWN
from builder.serving.interface import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from builder.serving.interface import ServeInterface

#: Options of ``docker run`` and ``podman run`` that take no value (docker run --help, Docker 26).
_DOCKER_SWITCHES = frozenset(
    ("--detach", "--disable-content-trust", "--help", "--init", "--interactive", "--no-healthcheck",
     "--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "--read-only", "--rm",
     "--sig-proxy", "--tty", "--replace")
)  # fmt: skip
_DOCKER_LETTERS = frozenset("ditPq")
#: vLLM's parser reads ``-O3``, ``-O 3`` and ``-O=3`` as this flag (vllm/utils/argparse_utils.py).
_LEVEL, _OPTIMIZATION = "-O", "--optimization-level"


@dataclass(frozen=True)
class Word:
    """A word of a command, and its line in the file."""

    text: str
    line: int
    #: the same as a script: with its line breaks, and the line on which it begins
    script: str = ""
    first: int = 0

    def as_script(self) -> tuple[str, int]:
        """The word as a script, and the line on which that begins."""
        return self.script or self.text, self.first or self.line


@dataclass(frozen=True, kw_only=True)
class GivenFlag:
    """A flag of ``vllm serve``; ``value`` is None where no word follows."""

    name: str
    value: str | None
    line: int


@dataclass(frozen=True, kw_only=True)
class GivenVariable:
    """An environment variable."""

    name: str
    value: str
    line: int


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """One start of a server."""

    file: str
    line: int
    #: what follows ``vllm serve``
    words: tuple[Word, ...] = ()
    env: tuple[GivenVariable, ...] = ()
    image: str = ""
    image_line: int = 0
    #: names of mods that change the image when it starts
    mods: tuple[str, ...] = ()
    #: of the recipe that made the file: its release and profile
    vllm: str = ""
    profile: str = ""

    @property
    def model(self) -> str:
        """The model that it serves, if the command names it."""
        first = next(iter(self.words), None)
        if first is not None and not first.text.startswith("-"):
            return first.text
        pairs = zip(self.words, self.words[1:], strict=False)
        return next((b.text for a, b in pairs if a.text == "--model"), "")

    def flags(self, interface: ServeInterface) -> Iterator[GivenFlag]:
        """Its flags, with the values that a release's parser assigns to each."""
        words = deque(self.words)
        while words:
            word = words.popleft()
            if not word.text.startswith("-") or word.text in ("-", "--"):
                continue
            name, equals, value = word.text.partition("=")
            if name.startswith(_LEVEL) and not name.startswith(f"{_LEVEL}."):
                short = name[len(_LEVEL) :] or (not equals and words and words.popleft().text)
                yield GivenFlag(name=_OPTIMIZATION, value=short or value, line=word.line)
                continue
            if equals:
                yield GivenFlag(name=name, value=value, line=word.line)
                continue
            known = interface.flag(canonical(name).partition(".")[0])
            free = _words_after(known.takes if known else "optional")
            given: list[str] = []
            while words and len(given) < free and not _is_flag(words[0].text):
                given.append(words.popleft().text)
            yield GivenFlag(name=name, value=" ".join(given) or None, line=word.line)


def _is_flag(text: str) -> bool:
    return text.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", text)


def _words_after(takes: object) -> int:
    """How many of the words that follow may belong to a flag."""
    if takes == "nothing":
        return 0
    if takes == "many":
        return sys.maxsize
    return takes if isinstance(takes, int) else 1


@dataclass
class DockerRun:
    """The image, variables and words of a ``docker run`` command line."""

    image: Word | None = None
    env: list[GivenVariable] = field(default_factory=list)
    entrypoint: str | None = None
    words: list[Word] = field(default_factory=list)


def read_docker_run(words: Iterable[Word]) -> DockerRun:
    """Read the words after ``docker run``."""
    run = DockerRun()
    rest = deque(words)
    while rest:
        word = rest.popleft()
        text = word.text
        if not text.startswith("-"):
            run.image, run.words = word, list(rest)
            return run
        name, equals, value = text.partition("=")
        if name in _DOCKER_SWITCHES or (
            not name.startswith("--") and set(name[1:]) <= _DOCKER_LETTERS
        ):
            continue
        if not name.startswith("--") and len(name) > 2:  # -eNAME=value
            name, value, equals = text[:2], text[2:], "="
        if not equals:
            value = rest.popleft().text if rest else ""
        if name in ("-e", "--env"):
            key, is_set, setting = value.partition("=")
            setting = setting if is_set else UNKNOWN  # -e NAME takes the caller's
            run.env.append(GivenVariable(name=key, value=setting, line=word.line))
        elif name == "--entrypoint":
            run.entrypoint = value
    return run


def serve_words(words: Sequence[Word], entrypoint: str | None, image: str) -> list[Word] | None:
    """What follows ``vllm serve`` in a container's command, or None if it starts no server.

    Official images have ``["vllm", "serve"]`` as their entrypoint.
    """
    texts = [word.text.rpartition("/")[2] for word in words]
    for at, text in enumerate(texts):
        if text == "vllm" and texts[at + 1 : at + 2] == ["serve"]:
            return list(words[at + 2 :])
        if text.endswith("vllm.entrypoints.openai.api_server"):
            return list(words[at + 1 :])
    if entrypoint is not None:
        named = entrypoint.rpartition("/")[2]
        if named == "vllm" and texts[:1] == ["serve"]:
            return list(words[1:])
        return None
    if texts[:1] == ["serve"] and any(text.startswith("--") for text in texts):
        return list(words[1:])  # the entrypoint of an image that is not official
    official = "vllm/vllm-openai" in image
    return list(words) if official and words else None
