"""Finds ``vllm serve`` commands in scripts, compose files, manifests, recipes, Dockerfiles."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from builder.errors import UsageError
from builder.layers import shell
from builder.layers.shell import UNKNOWN, read_script
from builder.serving.knownimages import known_image
from builder.serving.serveflags import canonical
from builder.serving.shellwords import SHELLS, misread, passed_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from yaml import SafeLoader
    from yaml.nodes import MappingNode, Node, ScalarNode

    from builder.layers.shell import Command
    from builder.serving.serveflags import ServeInterface
    from builder.serving.shellwords import Misread


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


class Mount(NamedTuple):
    """A file or folder of the host in a container."""

    source: str
    target: str
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
    #: the first word of what replaces the image's entrypoint; None: the image's own is run
    entrypoint: str | None = None
    #: whether the image's own entrypoint already serves, and the command says it again
    again: bool = False
    #: whether the image's own entrypoint does not serve, and the command does not say it
    bare: bool = False
    #: why a shell does not run it as it was meant
    misread: Misread | None = None
    #: what is mounted into its container
    mounts: tuple[Mount, ...] = ()
    #: words that a missing backslash cuts off
    lost: tuple[Word, ...] = ()
    #: what starts the container, and sets variables of the network itself
    launcher: str = ""
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
            while words and len(given) < free and not is_flag(words[0].text):
                given.append(words.popleft().text)
            yield GivenFlag(name=name, value=" ".join(given) or None, line=word.line)


def is_flag(text: str) -> bool:
    """Whether a word is a flag, and no negative number."""
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
    mounts: list[Mount] = field(default_factory=list)


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
            name, value, equals = text[:2], text[2:].removeprefix("="), "="
        if not equals:
            value = rest.popleft().text if rest else ""
        if name in ("-e", "--env"):
            run.env.append(_variable(value, word.line))
        elif name == "--entrypoint":
            run.entrypoint = value
        elif name in ("-v", "--volume", "--mount"):
            run.mounts += _mount(value, word.line)
    return run


def _mount(text: str, line: int) -> Iterator[Mount]:
    """A mount: ``SOURCE:TARGET[:OPTIONS]``, or ``type=bind,source=...,target=...``."""
    if "," in text and "=" in text.partition(",")[0]:
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        target = parts.get("target") or parts.get("dst") or parts.get("destination")
        source = parts.get("source") or parts.get("src") or ""
    else:
        source, _, rest = text.partition(":")
        target = rest.partition(":")[0]
    if target:
        yield Mount(source, target, line)


#: Flags that only servers of vLLM's kind have.
_OF_A_SERVER = re.compile(
    r"--(served[-_]model[-_]name|tensor[-_]parallel[-_]size|max[-_]model[-_]len|max[-_]num[-_]seqs|"
    r"gpu[-_]memory[-_]utilization|kv[-_]cache[-_]dtype|moe[-_]backend|reasoning[-_]parser|"
    r"tool[-_]call[-_]parser|speculative[-_]config|max[-_]num[-_]batched[-_]tokens)(=|$)"
)
#: The name of an image of vLLM, by anyone.
_VLLM_IMAGE = re.compile(r"vllm", re.IGNORECASE)


def _is_served(words: Sequence[Word], image: str) -> bool:
    """Whether an image that is not known serves what follows its name.

    Its first word is a model or a flag, not a program, and the others have a server's flags.
    """
    if not words or not _VLLM_IMAGE.search(image):
        return False
    first = words[0].text
    is_model = is_flag(first) or ("/" in first and not first.endswith((".sh", ".py")))
    return is_model and any(_OF_A_SERVER.match(word.text) for word in words)


def serve_words(words: Sequence[Word], entrypoint: str | None, image: str) -> list[Word] | None:
    """What follows ``vllm serve`` in a container's command, or None if it starts no server.

    Official images have ``["vllm", "serve"]`` as their entrypoint, and images of others may.
    """
    texts = [word.text.rpartition("/")[2] for word in words]
    for at, text in enumerate(texts):
        program = text in ("vllm", "vllm.entrypoints.cli.main")
        if program and texts[at + 1 : at + 2] == ["serve"]:
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
    known = known_image(image)
    guessed = known is None or bool(known.keeps)  # NVIDIA's runs the words as they are
    serves = _is_served(words, image) if guessed else bool(known and known.serves)
    return list(words) if serves and words else None


Kind = Literal["dockerfile", "yaml", "shell"]

#: Keys of a container in compose files, Kubernetes manifests and recipes.
_IMAGE, _COMMAND, _ENV = ("image", "container"), ("command", "args"), ("environment", "env")
_MOUNTS = ("volumes", "volumeMounts")
_CONTAINER_TOOLS = ("docker", "podman", "nerdctl")
#: Commands that run the command behind them.
_PREFIXES = frozenset(("exec", "sudo", "nohup", "time", "env", "-E"))
#: Options of a shell before a script in one word: -c, -lc, -ec.
_SCRIPT_FOLLOWS = re.compile(r"-[a-z]*c")
_SHELLS = SHELLS | {"su"}
#: Commands whose words are not run.
_TEXTS = frozenset(("echo", "printf", "pkill", "pgrep", "grep", "egrep", "kill", "logger", "alias"))
#: Options of ssh that take a word (ssh(1), OpenSSH 9).
_SSH_VALUES = frozenset("BbcDEeFIiJLlmOopQRSWw")
_SERVES = re.compile(r"\bvllm serve\s+[^\s;|&]|\bvllm\.entrypoints\.openai\.api_server\s+-")
#: Of a recipe's command: ``{{`` and ``}}`` are braces, ``{name}`` is filled in.
_PLACEHOLDER = re.compile(r"(\{\{|\}\})|\{(\w+)\}|\$\{[^}]*\}|\$\w+")
#: What compose fills in (``$$``, ``${NAME:-default}``, ``$NAME``), and Kubernetes (``$(NAME)``).
_FILLED_IN = re.compile(r"\$\$|\$\{\w+:?-([^${}]*)\}|\$\{[^}]*\}|\$\(\w+\)|\$\w+")
#: Words and variables of all commands of a file, and characters that are read to find them.  Files
#: of people have some hundred words; an alias or a variable can repeat them without end.
_MOST_WORDS, _MOST_LETTERS = 200_000, 1 << 23
#: Scripts within scripts: ``ssh host 'docker exec x bash -c "vllm serve ..."'`` has three.
_DEEPEST = 6
#: Nested lists and maps of YAML.
_DEEPEST_YAML = 100


@dataclass(frozen=True)
class _Known:
    """What is set before a script begins."""

    variables: Mapping[str, str] = field(default_factory=dict)
    exported: tuple[GivenVariable, ...] = ()


@dataclass
class _File:
    """A file that is read, and how much may still be read in it."""

    name: str
    words: int = _MOST_WORDS
    letters: int = _MOST_LETTERS

    def command(
        self, words: Sequence[Word], env: Sequence[GivenVariable], **more: Any
    ) -> ServeCommand:
        """A serve command, whose words count.

        Raises:
            UsageError: all commands together are too large.
        """
        self.words -= len(words) + len(env)
        if self.words < 0:
            raise UsageError(
                f"{self.name}: its commands have more than {_MOST_WORDS} words and variables"
            )
        return ServeCommand(file=self.name, words=tuple(words), env=tuple(env), **more)

    def read(self, text: str) -> str:
        """A text, which counts.

        Raises:
            UsageError: all texts together are too large.
        """
        self.letters -= len(text)
        if self.letters < 0:
            raise UsageError(
                f"{self.name}: placeholders, aliases and scripts repeat its text until it is "
                f"larger than {_MOST_LETTERS >> 20} MiB"
            )
        return text

    def script(self, text: str, variables: Mapping[str, str] | None = None) -> list[Command]:
        """The commands of a script.

        Raises:
            UsageError: it is nested too deeply, or is too large with its variables.
        """
        try:
            return read_script(self.read(text).encode("utf-8", "replace"), variables)
        except UsageError as error:
            raise self._named(error) from None

    def open_quotes(self, text: str) -> list[int]:
        """The lines of a script on which a quote begins that is not closed.

        Raises:
            UsageError: it is nested too deeply.
        """
        try:
            return shell.open_quotes(self.read(text).encode("utf-8", "replace"))
        except UsageError as error:
            raise self._named(error) from None

    def _named(self, error: UsageError) -> UsageError:
        text = str(error)
        return UsageError(text if text.startswith(self.name) else f"{self.name}: {text}")


def read_commands(name: str, text: str) -> list[ServeCommand]:
    """The serve commands of a file, by its name and content.

    Raises:
        UsageError: it is YAML or JSON that cannot be read, or it expands to too much.
    """
    return list(_read(_File(name), _kind(name), text))


def _read(file: _File, kind: Kind, text: str) -> Iterator[ServeCommand]:
    if kind == "dockerfile":
        return _dockerfile(file, text)
    if kind == "yaml":
        return _yaml(file, text)
    if file.name.lower().endswith(".service"):
        text = _UNIT.sub(lambda match: "export " if match[1] else "", text)
    return _script(file, text, 1)


#: Lines of a unit of systemd that run a program or set variables, and what a shell has for them.
_UNIT = re.compile(r"^(?:ExecStart=[-@:+!|]*|(Environment=))", re.MULTILINE)


def _kind(name: str) -> Kind:
    base = name.rpartition("/")[2].lower()
    if base.startswith("dockerfile") or base.endswith((".dockerfile", "containerfile")):
        return "dockerfile"
    return "yaml" if base.endswith((".yaml", ".yml", ".json")) else "shell"


def open_quotes(name: str, text: str) -> list[int]:
    """The lines on which a command has a quote that is not closed.

    Raises:
        UsageError: it is YAML or JSON that cannot be read, or it expands to too much.
    """
    kind, file = _kind(name), _File(name)
    if kind == "shell":
        commands = file.script(text)
        inner = [line for command in commands for line in _open_in_words(file, _placed(command))]
        return [*file.open_quotes(text), *inner]
    if kind == "dockerfile":
        return [
            line for number, row in _instructions(text) for line in _open_in_row(file, row, number)
        ]
    return [
        line
        for document in _documents(name, text)
        for mapping in _mappings(document, set())
        for line in _open_in_container(file, mapping)
    ]


def _placed(command: Command, before: int = 0) -> list[Word]:
    """The words of a command, with their lines; ``before`` lines are before its script."""
    rows = zip(command.words, command.lines, command.scripts, strict=False)
    return [Word(text, before + line, script) for text, line, script in rows]


def _open_in_words(file: _File, words: Sequence[Word]) -> Iterator[int]:
    """Check a script that a shell gets as one word: ``sh -c 'vllm serve ...'``."""
    for option, word in pairwise(words):
        if _SCRIPT_FOLLOWS.fullmatch(option.text) and "vllm serve" in word.text:
            text, first = word.as_script()
            yield from (first + line - 1 for line in file.open_quotes(text))


def _open_in_row(file: _File, row: str, number: int) -> Iterator[int]:
    """Check an instruction of a Dockerfile."""
    instruction, _, rest = row.partition(" ")
    if instruction.upper() not in ("CMD", "ENTRYPOINT", "ENV"):
        return
    if _closed(rest):
        yield from _open_in_words(file, _exec_form(rest, number))
    else:
        yield number


def _open_in_container(file: _File, mapping: MappingNode) -> Iterator[int]:
    from yaml.nodes import ScalarNode

    keys = {key.value: value for key, value in mapping.value if isinstance(key.value, str)}
    if not {*_IMAGE, "recipe_version"} & set(keys):
        return
    for key in (*_COMMAND, "entrypoint"):
        node = keys.get(key)
        if isinstance(node, ScalarNode) and node.style in ("|", ">"):
            yield from (_line(node) + line for line in file.open_quotes(node.value))
        elif isinstance(node, ScalarNode) and not _closed(file.read(node.value)):
            yield _line(node)
    parts = (keys[key] for key in ("entrypoint", *_COMMAND) if key in keys)
    yield from _open_in_words(file, [word for part in parts for word in _words(file, part)])


def _closed(text: str) -> bool:
    """Whether all quotes of a command are closed."""
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


# -- shell


def _script(
    file: _File,
    text: str,
    first: int,
    known: _Known | None = None,
    depth: int = 0,
) -> Iterator[ServeCommand]:
    """The serve commands of a script that begins on line ``first``.

    Raises:
        UsageError: scripts are nested too deeply, or it is too large with its variables.
    """
    if depth > _DEEPEST:
        raise UsageError(f"{file.name}: scripts are nested too deeply")
    known = known or _Known()
    exported = {one.name: one for one in known.exported}
    for command, lost in _with_lost(file.script(text, known.variables)):
        for key, value in command.exports:
            exported[key] = GivenVariable(name=key, value=value, line=first + command.line - 1)
        words = _placed(command, first - 1)
        own = [
            GivenVariable(name=k, value=v, line=first + command.line - 1)
            for k, v in command.assigned
        ]
        served = list(_of_words(file, words, (*exported.values(), *own), depth))
        if lost and served:
            cut = tuple(word for one in lost for word in _placed(one, first - 1))
            served[-1] = replace(served[-1], lost=cut)
        yield from served
        yield from _of_heredocs(file, command, first, tuple(exported.values()), depth)


def _with_lost(commands: Sequence[Command]) -> Iterator[tuple[Command, list[Command]]]:
    """Each command with those behind it that begin with a flag: a backslash is missing before."""
    groups: list[tuple[Command, list[Command]]] = []
    for command in commands:
        if groups and command.words and len(command.words[0]) > 1 and is_flag(command.words[0]):
            groups[-1][1].append(command)
        else:
            groups.append((command, []))
    for command, lost in groups:
        if lost and command.name in _CONTAINER_TOOLS and not _has_image(command):
            yield _joined(command, lost), lost  # the image is on a line that is cut off
        else:
            yield command, lost


def _has_image(command: Command) -> bool:
    words = list(command.words)
    placed = [Word(text, 0) for text in words]
    return "run" not in words or bool(read_docker_run(placed[words.index("run") + 1 :]).image)


def _joined(command: Command, rest: Sequence[Command]) -> Command:
    """One command of several, as they were meant."""
    parts = (command, *rest)
    return replace(
        command,
        words=tuple(word for part in parts for word in part.words),
        lines=tuple(line for part in parts for line in part.lines),
        scripts=tuple(text for part in parts for text in part.scripts),
    )


def _of_heredocs(
    file: _File, command: Command, first: int, exported: Sequence[GivenVariable], depth: int
) -> Iterator[ServeCommand]:
    """The serve commands of the here-documents that a command runs, or writes to a file."""
    source = command.source if command.source and command.source.name == "cat" else None
    for owner in filter(None, (command, source)):
        for document in owner.heredocs:
            at = first + document.line - 1
            names = [word for word in command.words if not word.startswith("-")]
            output = names[-1] if "tee" in names and owner is source else document.output
            runs = {name.rpartition("/")[2] for name in names} & {*_SHELLS, "ssh"}
            if output and command.name in ("cat", "tee", "sudo"):
                kind = _kind(output)
                inner = (
                    _script(file, document.text, at, depth=depth + 1)
                    if kind == "shell"
                    else (_moved(one, at - 1) for one in _read(file, kind, document.text))
                )
                yield from inner
            elif runs:
                known = _Known(
                    variables=command.variables or owner.variables if document.expanded else {},
                    exported=() if "ssh" in runs else tuple(exported),
                )
                yield from _script(file, document.text, at, known, depth + 1)


def _moved(command: ServeCommand, lines: int) -> ServeCommand:
    """A command of a text that begins behind some lines of its file."""
    return replace(
        command,
        line=command.line + lines,
        image_line=command.image_line + lines,
        words=tuple(replace(word, line=word.line + lines) for word in command.words),
        env=tuple(replace(one, line=one.line + lines) for one in command.env),
    )


def _of_words(
    file: _File, words: list[Word], env: Sequence[GivenVariable], depth: int
) -> Iterator[ServeCommand]:
    """The serve commands of one command line."""
    own = list(env)
    at = 0
    while at < len(words) and (words[at].text in _PREFIXES or "=" in words[at].text):
        key, equals, value = words[at].text.partition("=")
        own += [GivenVariable(name=key, value=value, line=words[at].line)] if equals else []
        at += 1
    words = words[at:]
    texts = [word.text for word in words]
    program = texts[0].rpartition("/")[2] if texts else ""
    if not texts or program in _TEXTS:
        return
    start = next((at for at, text in enumerate(texts) if text in ("run", "create")), None)
    if program in _CONTAINER_TOOLS and start is not None:
        run = read_docker_run(words[start + 1 :])
        if run.image is not None:
            mounts = tuple(run.mounts)
            for one in _in_container(file, run.words, run.entrypoint, run.image, run.env, depth):
                yield replace(one, mounts=(*mounts, *one.mounts))
        return
    if program == _LAUNCHER:
        yield from _launched(file, words, own, depth)
        return
    inside = program in _CONTAINER_TOOLS and "exec" in texts
    if program in (*_CONTAINER_TOOLS, "ssh"):  # the command runs elsewhere
        own = list(_of_exec(words)) if inside else []
    for one in _of_program(file, words, own, depth):
        yield replace(one, launcher=program) if inside and not one.launcher else one


def _of_program(
    file: _File, words: Sequence[Word], own: Sequence[GivenVariable], depth: int
) -> Iterator[ServeCommand]:
    """The serve commands of a program that runs another one."""
    program = words[0].text.rpartition("/")[2]
    if wrong := misread([word.text for word in words]):
        for one in _of_program(file, words[wrong.at :], own, depth):
            yield replace(one, misread=wrong)
        return
    remote = _remote(words) if program == "ssh" else None
    script = (remote,) if remote is not None else _scripts_in(words)
    if script:
        known = _Known(exported=tuple(own))
        for text, first in script:
            yield from _script(file, text, first, known, depth + 1)
        return
    served = serve_words(words, "", "")
    if served is not None:
        yield file.command(served, own, line=words[0].line)


#: The script of spark-vllm-docker that starts containers on each node, and its default image.
_LAUNCHER, _LAUNCHERS_IMAGE = "launch-cluster.sh", "vllm-node"
#: What sets the variables of the network itself.
LAUNCHERS = (_LAUNCHER, "recipe")
#: A variable with options of ``docker run``.
_LAUNCHER_DOCKER = "VLLM_SPARK_EXTRA_DOCKER_ARGS"
_LAUNCHER_ACTIONS = ("exec", "start", "status", "stop")
_LAUNCHER_SWITCHES = frozenset(
    ("--solo", "-d", "--daemon", "--no-ray", "--check-config", "--non-privileged", "--earlyoom",
     "--no-cache-dirs", "--dry-run")
)  # fmt: skip


def _launched(
    file: _File, words: Sequence[Word], own: Sequence[GivenVariable], depth: int
) -> Iterator[ServeCommand]:
    """The serve commands of ``launch-cluster.sh [options] exec COMMAND``."""
    image, mods = Word(_LAUNCHERS_IMAGE, words[0].line), []
    runs = [
        read_docker_run([Word(text, one.line) for text in _split(one.value)])
        for one in own
        if one.name == _LAUNCHER_DOCKER
    ]
    env = [variable for run in runs for variable in run.env]
    mounts = tuple(mount for run in runs for mount in run.mounts)
    rest = deque(words[1:])
    while rest:
        word = rest.popleft()
        if not word.text.startswith("-"):
            break
        name, equals, value = word.text.partition("=")
        alone = not equals and bool(rest) and rest[0].text in _LAUNCHER_ACTIONS
        if name in _LAUNCHER_SWITCHES or alone:
            continue
        given = Word(value, word.line) if equals else rest.popleft() if rest else Word("", 0)
        if name in ("-t", "--image"):
            image = given
        elif name in ("-e", "--env"):
            env.append(_variable(given.text, word.line))
        elif name.startswith("--apply-"):
            mods.append(given.text)
    for one in _in_container(file, list(rest), "", image, env, depth):
        yield replace(
            one, mods=tuple(mods), launcher=_LAUNCHER, entrypoint=None, mounts=mounts,
        )  # fmt: skip


def _variable(text: str, line: int) -> GivenVariable:
    """``NAME=VALUE``; a name alone takes the caller's value."""
    name, is_set, value = text.partition("=")
    return GivenVariable(name=name, value=value if is_set else UNKNOWN, line=line)


def _of_exec(words: Sequence[Word]) -> Iterator[GivenVariable]:
    """The variables of ``docker exec -e NAME=VALUE CONTAINER COMMAND``."""
    for at, word in enumerate(words):
        if _serves_at(words, at):
            return
        name, equals, value = word.text.partition("=")
        if name in ("-e", "--env"):
            text = value if equals else words[at + 1].text if at + 1 < len(words) else ""
            yield _variable(text, word.line)


def _serves_at(words: Sequence[Word], at: int) -> bool:
    """Whether ``vllm serve`` begins there."""
    return words[at].text.rpartition("/")[2] == "vllm" and at + 1 < len(words)


def _in_container(
    file: _File,
    words: Sequence[Word],
    entrypoint: str | None,
    image: Word,
    env: Sequence[GivenVariable],
    depth: int = 0,
) -> Iterator[ServeCommand]:
    """The serve commands of a container's command line."""
    whole = [*([Word(entrypoint, image.line)] if entrypoint else []), *words]
    if wrong := misread([word.text for word in whole]):
        replaced = "" if entrypoint is None else entrypoint
        for one in _in_container(file, whole[wrong.at :], "", image, env, depth):
            yield replace(one, misread=wrong, entrypoint=replaced)
        return
    if (at := passed_on([word.text for word in whole])) is not None:
        for one in _in_container(file, whole[at:], "", image, env, depth):
            yield replace(one, entrypoint=entrypoint)
        return
    known = known_image(image.text)
    scripts = _scripts_in(whole)
    for text, first in scripts:
        for inner in _script(file, text, first, depth=depth + 1):
            yield replace(
                inner, env=(*env, *inner.env), image=inner.image or image.text,
                image_line=inner.image_line or image.line, entrypoint=entrypoint,
            )  # fmt: skip
    served = None if scripts else serve_words(words, entrypoint, image.text)
    if served is not None:
        line = words[0].line if words else image.line
        said = len(served) < len(words)
        again = entrypoint is None and bool(known and known.serves) and said
        bare = entrypoint is None and bool(known and known.keeps) and not said
        yield file.command(
            served, env, line=line, image=image.text, image_line=image.line,
            entrypoint=entrypoint, again=again, bare=bare,
        )  # fmt: skip


def _scripts_in(words: Sequence[Word]) -> list[tuple[str, int]]:
    """The scripts among the words of a command, each with its line: ``bash -c SCRIPT``."""
    scripts = []
    shells = False
    for at, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        if name == "eval" and at == 0:
            return [(" ".join(one.as_script()[0] for one in words[1:]), word.line)]
        if shells and _SCRIPT_FOLLOWS.fullmatch(word.text):
            rest = (one for one in words[at + 1 :] if not one.text.startswith("-"))
            return [one.as_script() for one in islice(rest, 1)]
        shells = shells or name in _SHELLS
        if at and _SERVES.search(word.text):  # tmux new-session -d 'vllm serve ...'
            scripts.append(word.as_script())
    return scripts


def _remote(words: Sequence[Word]) -> tuple[str, int] | None:
    """The script that ``ssh`` runs on its host, and its line; None if it runs none.

    It joins its words with blanks; here they keep their lines.
    """
    at = 1
    while at < len(words) and words[at].text.startswith("-"):
        at += 2 if words[at].text[-1] in _SSH_VALUES and len(words[at].text) == 2 else 1
    rest = words[at + 1 :]
    if not rest:
        return None
    text, first = rest[0].as_script()
    line = first + text.count("\n")
    parts = [text]
    for word in rest[1:]:
        inner, start = word.as_script()
        breaks = max(0, start - line)
        parts += [" \\\n" * breaks or " ", inner]
        line += breaks + inner.count("\n")
    return "".join(parts), first


# -- Dockerfiles


def _dockerfile(file: _File, text: str) -> Iterator[ServeCommand]:
    image = Word("", 0)
    env: list[GivenVariable] = []
    entrypoint: list[Word] | None = None
    command: list[Word] = []
    for number, line in _instructions(text):
        word, _, rest = line.partition(" ")
        instruction = word.upper()
        if instruction == "FROM":
            parts = [part for part in rest.split() if not part.startswith("--")]
            image = Word(parts[0] if parts else "", number)
            env, entrypoint, command = [], None, []
        elif instruction == "ENV":
            env += _dockerfile_env(rest, number)
        elif instruction == "ENTRYPOINT":
            entrypoint = _exec_form(rest, number)
        elif instruction == "CMD":
            command = _exec_form(rest, number)
    words = [*(entrypoint or []), *command]
    replaced = None if entrypoint is None else ""
    served = list(_in_container(file, words, replaced, image, env))
    yield from served
    if env and not served:
        at = (words or [image])[0].line
        yield file.command((), env, line=at, image=image.text, image_line=image.line)


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Each instruction with the number of its first line; continued lines are joined."""
    start = 0
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not parts and (not stripped or stripped.startswith("#")):
            continue
        start = start if parts else number
        if stripped.startswith("#"):
            continue
        parts.append(stripped.removesuffix("\\"))
        if not stripped.endswith("\\"):
            yield start, " ".join(parts)
            parts = []


def _dockerfile_env(rest: str, line: int) -> list[GivenVariable]:
    words = _split(rest)
    if words and "=" not in words[0]:  # ENV NAME the value
        return [GivenVariable(name=words[0], value=" ".join(words[1:]), line=line)]
    pairs = (word.partition("=") for word in words)
    return [GivenVariable(name=key, value=value, line=line) for key, _, value in pairs]


def _exec_form(rest: str, line: int) -> list[Word]:
    try:
        words = json.loads(rest) if rest.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        words = _split(rest)  # for a shell
    return [Word(word, line) for word in words]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()


# -- YAML


def _yaml(file: _File, text: str) -> Iterator[ServeCommand]:
    for document in _documents(file.name, text):
        kubernetes = _is_kubernetes(document)
        for mapping in _mappings(document, set()):
            yield from _container(file, mapping, kubernetes=kubernetes)


@cache
def _loader() -> type[SafeLoader]:
    """YAML's safe loader, for files that are not nested deeply: its time grows with the depth."""
    import yaml

    class Shallow(yaml.SafeLoader):
        def fetch_flow_collection_start(self, TokenClass: type) -> None:  # noqa: N803 - its name
            self._limit(self.flow_level)
            super().fetch_flow_collection_start(TokenClass)

        def add_indent(self, column: int) -> bool:
            self._limit(len(self.indents))
            return bool(super().add_indent(column))

        @staticmethod
        def _limit(depth: int) -> None:
            if depth > _DEEPEST_YAML:
                raise yaml.YAMLError("it is nested too deeply")

    return Shallow


def _documents(name: str, text: str) -> Iterator[Node | None]:
    """The documents of a file.

    Raises:
        UsageError: it is not valid YAML.
    """
    import yaml

    try:
        yield from yaml.compose_all(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{name}{line}: not valid YAML: {problem}") from None
    except ValueError as error:  # a code point that is none
        raise UsageError(f"{name}: not valid YAML: {error}") from None


def _mappings(node: Node | None, seen: set[int]) -> Iterator[MappingNode]:
    """Every mapping once: aliases name the same node again."""
    from yaml.nodes import MappingNode, SequenceNode

    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value, seen)
    elif isinstance(node, SequenceNode):
        for item in node.value:
            yield from _mappings(item, seen)


def _is_kubernetes(document: Node | None) -> bool:
    """Whether a document is a manifest: there ``command`` replaces an image's entrypoint."""
    from yaml.nodes import MappingNode

    if not isinstance(document, MappingNode):
        return False
    keys = {key.value for key, _ in document.value if isinstance(key.value, str)}
    return {"apiVersion", "kind"} <= keys


def _container(
    file: _File, mapping: MappingNode, *, kubernetes: bool = False
) -> Iterator[ServeCommand]:
    keys = {key.value: value for key, value in mapping.value if isinstance(key.value, str)}
    image = next((_words(file, keys[key]) for key in _IMAGE if key in keys), [])
    defaults = keys.get("defaults")
    recipe = "recipe_version" in keys
    values = dict(_pairs(file, defaults)) if defaults is not None else {}
    if recipe:
        values |= {key: value for key, value in _pairs(file, mapping) if key == "model"}
    parts = [keys[key] for key in _COMMAND if key in keys]
    entry = _words(file, keys["entrypoint"]) if "entrypoint" in keys else None
    ref = Word(_interpolated(image[0].text), image[0].line) if image else Word("", 0)
    cleared = entry is not None or recipe or not parts
    entrypoint = "" if cleared else None
    own = None if entry is None else _first(entry)
    if kubernetes and entry is None and "command" in keys:
        own, entrypoint = _first(_words(file, keys["command"])), ""
    env = [variable for key in _ENV if key in keys for variable in _env(file, keys[key])]
    mods = tuple(word.text for word in _words(file, keys["mods"])) if "mods" in keys else ()
    mounts = tuple(mount for key in _MOUNTS if key in keys for mount in _mounts(file, keys[key]))
    block = _block(file, parts, values) if not entry else None
    commands = list(_script(file, *block)) if block else []
    if commands:  # a script of several commands
        for one in commands:
            yield replace(
                one, env=(*env, *one.env), image=one.image or ref.text,
                image_line=one.image_line or ref.line, mods=mods, mounts=mounts,
                entrypoint=own, launcher="recipe" if recipe else "",
            )  # fmt: skip
        return
    words = [word for part in parts for word in _words(file, part, values)]
    for one in _in_container(file, [*(entry or []), *words], entrypoint, ref, env):
        filled = tuple(replace(word, text=_interpolated(word.text)) for word in one.words)
        yield replace(
            one, words=filled, mods=mods, entrypoint=own, mounts=mounts,
            launcher="recipe" if recipe else "",
        )  # fmt: skip


def _mounts(file: _File, node: Node) -> Iterator[Mount]:
    """The mounts of a list: texts as of ``docker run``, or maps of compose and Kubernetes."""
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    for item in node.value if isinstance(node, SequenceNode) else ():
        if isinstance(item, ScalarNode):
            yield from _mount(_interpolated(file.read(item.value)), _line(item))
        elif isinstance(item, MappingNode):
            pairs = dict(_pairs(file, item))
            target = pairs.get("target") or pairs.get("mountPath")
            source = pairs.get("source") or pairs.get("subPath") or pairs.get("name") or ""
            if target:
                yield Mount(source, target, _line(item))


def _first(words: Sequence[Word]) -> str:
    return words[0].text if words else ""


def _block(file: _File, parts: Sequence[Node], values: Mapping[str, str]) -> tuple[str, int] | None:
    """A command that is a text of several lines, and its line."""
    from yaml.nodes import ScalarNode

    if len(parts) == 1 and isinstance(parts[0], ScalarNode) and parts[0].style in ("|", ">"):
        return _filled(file, parts[0].value, values), _line(parts[0]) + 1
    return None


def _words(file: _File, node: Node, values: Mapping[str, str] | None = None) -> list[Word]:
    """The words of a scalar or a list; ``{name}`` is filled in from a recipe's defaults."""
    from yaml.nodes import ScalarNode, SequenceNode

    if isinstance(node, SequenceNode):
        return [_word(file, i, values) for i in node.value if isinstance(i, ScalarNode)]
    if not isinstance(node, ScalarNode):
        return []
    text = _filled(file, node.value, values)
    if node.style in ("|", ">"):
        first = _line(node) + 1
        words = [word for one in file.script(text) for word in _placed(one, first - 1)]
        return words if node.style == "|" else [Word(w.text, first, w.script) for w in words]
    return [Word(word, _line(node)) for word in _split(text)]


def _word(file: _File, node: ScalarNode, values: Mapping[str, str] | None) -> Word:
    """An item of a list; a script in it begins on the line after ``|``."""
    line = _line(node)
    text = _filled(file, node.value, values)
    return Word(text, line, text, line + (node.style in ("|", ">")))


def _filled(file: _File, text: str, values: Mapping[str, str] | None) -> str:
    """A command with the values that its file gives; others are unknown.

    Raises:
        UsageError: it is too large with them.
    """
    file.read(text)
    if not values:
        return text

    def fill(match: re.Match[str]) -> str:
        return match[1][0] if match[1] else file.read(values.get(match[2] or "", UNKNOWN))

    return _PLACEHOLDER.sub(fill, text)


def _interpolated(text: str) -> str:
    """A text with what compose and Kubernetes fill in; what is only known later is unknown."""

    def fill(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else match[1] or UNKNOWN

    return _FILLED_IN.sub(fill, text) if "$" in text else text


def _env(file: _File, node: Node) -> Iterator[GivenVariable]:
    """A map, a list of ``NAME=value``, or Kubernetes' list of ``name`` and ``value``."""
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                text = file.read(value.value) if isinstance(value, ScalarNode) else UNKNOWN
                text = _interpolated(text)
                yield GivenVariable(name=file.read(key.value), value=text, line=_line(key))
    elif isinstance(node, SequenceNode):
        for item in node.value:
            if isinstance(item, ScalarNode):
                name, is_set, value = file.read(item.value).partition("=")
                value = _interpolated(value) if is_set else UNKNOWN
                yield GivenVariable(name=name, value=value, line=_line(item))
            elif isinstance(item, MappingNode):
                pairs = dict(_pairs(file, item))
                if "name" in pairs:
                    value = _interpolated(pairs["value"]) if "value" in pairs else UNKNOWN
                    yield GivenVariable(name=pairs["name"], value=value, line=_line(item))


def _pairs(file: _File, node: Node) -> Iterator[tuple[str, str]]:
    from yaml.nodes import MappingNode, ScalarNode

    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode) and isinstance(value, ScalarNode):
                yield file.read(key.value), file.read(value.value)


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
