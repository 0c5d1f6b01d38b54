"""Finds serve commands in files: shell scripts, compose files, manifests, recipes, Dockerfiles."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from builder.conversion import shell
from builder.conversion.shell import UNKNOWN, read_script
from builder.errors import UsageError
from builder.lint.commands import (
    GivenVariable,
    ServeCommand,
    Word,
    read_docker_run,
    serve_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yaml.nodes import MappingNode, Node

    from builder.conversion.shell import Command

#: Keys of a container in compose files, Kubernetes manifests and recipes.
_IMAGE, _COMMAND, _ENV = ("image", "container"), ("command", "args"), ("environment", "env")
_CONTAINER_TOOLS = ("docker", "podman", "nerdctl")
#: Commands that run the command behind them.
_PREFIXES = frozenset(("exec", "sudo", "nohup", "time", "env", "-E"))
#: Options of a shell before a script in one word: -c, -lc, -ec.
_SCRIPT_FOLLOWS = re.compile(r"-[a-z]*c")
_PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}(?!\})|\$\{[^}]*\}|\$\w+")


def read_commands(name: str, text: str) -> list[ServeCommand]:
    """The serve commands of a file, by its name and content.

    Raises:
        UsageError: it is YAML or JSON that cannot be read.
    """
    readers = {"dockerfile": _dockerfile, "yaml": _yaml, "shell": _shell}
    return list(readers[_kind(name)](name, text))


def _kind(name: str) -> Literal["dockerfile", "yaml", "shell"]:
    base = name.rpartition("/")[2].lower()
    if base.startswith("dockerfile") or base.endswith((".dockerfile", "containerfile")):
        return "dockerfile"
    return "yaml" if base.endswith((".yaml", ".yml", ".json")) else "shell"


def open_quotes(name: str, text: str) -> list[int]:
    """The lines on which a command has a quote that is not closed.

    Raises:
        UsageError: it is YAML or JSON that cannot be read.
    """
    kind = _kind(name)
    if kind == "shell":
        data = text.encode()
        inner = [line for command in read_script(data) for line in _open_in_words(_placed(command))]
        return [*shell.open_quotes(data), *inner]
    if kind == "dockerfile":
        return [line for number, row in _instructions(text) for line in _open_in_row(row, number)]
    return [
        line
        for document in _documents(name, text)
        for mapping in _mappings(document, set())
        for line in _open_in_container(mapping)
    ]


def _placed(command: Command) -> list[Word]:
    return [Word(*pair) for pair in zip(command.words, command.lines, strict=False)]


def _open_in_words(words: Sequence[Word]) -> Iterator[int]:
    """Check a script that a shell gets as one word: ``sh -c 'vllm serve ...'``."""
    for option, word in pairwise(words):
        if _SCRIPT_FOLLOWS.fullmatch(option.text) and "vllm serve" in word.text:
            yield from (word.line + n - 1 for n in shell.open_quotes(word.text.encode()))


def _open_in_row(row: str, number: int) -> Iterator[int]:
    """Check an instruction of a Dockerfile."""
    instruction, _, rest = row.partition(" ")
    if instruction.upper() not in ("CMD", "ENTRYPOINT", "ENV"):
        return
    if _closed(rest):
        yield from _open_in_words(_exec_form(rest, number))
    else:
        yield number


def _open_in_container(mapping: MappingNode) -> Iterator[int]:
    from yaml.nodes import ScalarNode

    keys = {key.value: value for key, value in mapping.value if isinstance(key.value, str)}
    if not {*_IMAGE, "recipe_version"} & set(keys):
        return
    for key in (*_COMMAND, "entrypoint"):
        node = keys.get(key)
        if isinstance(node, ScalarNode) and node.style in ("|", ">"):
            yield from (_line(node) + line for line in shell.open_quotes(node.value.encode()))
        elif isinstance(node, ScalarNode) and not _closed(node.value):
            yield _line(node)
    parts = (keys[key] for key in ("entrypoint", *_COMMAND) if key in keys)
    yield from _open_in_words([word for part in parts for word in _words(part)])


def _closed(text: str) -> bool:
    """Whether all quotes of a command are closed."""
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


# -- shell


def _shell(name: str, text: str) -> Iterator[ServeCommand]:
    exported: dict[str, GivenVariable] = {}
    for command in read_script(text.encode()):
        for key, value in command.exports:
            exported[key] = GivenVariable(name=key, value=value, line=command.line)
        found = _of_shell(name, command, exported)
        if found is not None:
            yield found


def _of_shell(
    name: str, command: Command, exported: dict[str, GivenVariable]
) -> ServeCommand | None:
    words = _placed(command)
    own = [GivenVariable(name=k, value=v, line=command.line) for k, v in command.assigned]
    while words and (words[0].text in _PREFIXES or "=" in words[0].text):
        key, equals, value = words.pop(0).text.partition("=")
        own += [GivenVariable(name=key, value=value, line=command.line)] if equals else []
    texts = [word.text for word in words]
    if texts and texts[0].rpartition("/")[2] in _CONTAINER_TOOLS and "run" in texts:
        run = read_docker_run(words[texts.index("run") + 1 :])
        image = run.image.text if run.image else ""
        served = serve_words(run.words, run.entrypoint, image)
        if served is None:
            return None
        line = run.image.line if run.image else command.line
        return ServeCommand(
            file=name, line=command.line, words=tuple(served), env=tuple(run.env), image=image,
            image_line=line,
        )  # fmt: skip
    served = serve_words(words, "", "")
    if served is None:
        return None
    env = (*exported.values(), *own)
    return ServeCommand(file=name, line=command.line, words=tuple(served), env=env)


# -- Dockerfiles


def _dockerfile(name: str, text: str) -> Iterator[ServeCommand]:
    image = Word("", 0)
    env: list[GivenVariable] = []
    entrypoint: list[Word] = []
    command: list[Word] = []
    for number, line in _instructions(text):
        word, _, rest = line.partition(" ")
        instruction = word.upper()
        if instruction == "FROM":
            parts = [part for part in rest.split() if not part.startswith("--")]
            image = Word(parts[0] if parts else "", number)
            env, entrypoint, command = [], [], []
        elif instruction == "ENV":
            env += _dockerfile_env(rest, number)
        elif instruction == "ENTRYPOINT":
            entrypoint = _exec_form(rest, number)
        elif instruction == "CMD":
            command = _exec_form(rest, number)
    words = [*entrypoint, *command]
    served = serve_words(words, "" if entrypoint else None, image.text)
    if served is not None or env:
        first = (words or [image])[0]
        yield ServeCommand(
            file=name, line=first.line, words=tuple(served or ()), env=tuple(env),
            image=image.text, image_line=image.line,
        )  # fmt: skip


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
        words = json.loads(rest)
    except ValueError:
        words = _split(rest)
    return [Word(str(word), line) for word in words]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()


# -- YAML


def _yaml(name: str, text: str) -> Iterator[ServeCommand]:
    for document in _documents(name, text):
        for mapping in _mappings(document, set()):
            yield from _container(name, mapping)


def _documents(name: str, text: str) -> Iterator[Node | None]:
    """The documents of a file.

    Raises:
        UsageError: it is not valid YAML.
    """
    import yaml

    try:
        yield from yaml.compose_all(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise UsageError(f"{name}: not valid YAML: it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{name}{line}: not valid YAML: {problem}") from None


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


def _container(name: str, mapping: MappingNode) -> Iterator[ServeCommand]:
    keys = {key.value: value for key, value in mapping.value if isinstance(key.value, str)}
    image = next((_words(keys[key]) for key in _IMAGE if key in keys), [])
    defaults = keys.get("defaults")
    values = dict(_pairs(defaults)) if defaults is not None else {}
    words = [word for key in _COMMAND if key in keys for word in _words(keys[key], values)]
    entry = _words(keys["entrypoint"]) if "entrypoint" in keys else None
    recipe = "recipe_version" in keys
    if entry:
        words = [*entry, *words]
    ref = image[0] if image else Word("", 0)
    entrypoint = "" if entry or recipe or ("args" not in keys and "command" not in keys) else None
    served = serve_words(words, entrypoint, ref.text)
    if served is None:
        return
    env = [variable for key in _ENV if key in keys for variable in _env(keys[key])]
    line = (served or words or [ref])[0].line
    yield ServeCommand(
        file=name, line=line, words=tuple(served), env=tuple(env), image=ref.text,
        image_line=ref.line,
    )  # fmt: skip


def _words(node: Node, values: dict[str, str] | None = None) -> list[Word]:
    """The words of a scalar or a list; ``{name}`` is filled in from a recipe's defaults."""
    from yaml.nodes import ScalarNode, SequenceNode

    if isinstance(node, SequenceNode):
        return [Word(_filled(i.value, values), _line(i)) for i in node.value
                if isinstance(i, ScalarNode)]  # fmt: skip
    if not isinstance(node, ScalarNode):
        return []
    if node.style in ("|", ">"):
        first = _line(node) + 1
        script = read_script(_filled(node.value, values).encode())
        found = [
            Word(text, first + line - 1)
            for command in script
            for text, line in zip(command.words, command.lines, strict=False)
        ]
        return found if node.style == "|" else [Word(w.text, first) for w in found]
    return [Word(word, _line(node)) for word in _split(_filled(node.value, values))]


def _filled(text: str, values: dict[str, str] | None) -> str:
    """A command with the values that its file gives; others are unknown."""

    def fill(match: re.Match[str]) -> str:
        return (values or {}).get(match[1] or "", UNKNOWN)

    return _PLACEHOLDER.sub(fill, text).replace("{{", "{").replace("}}", "}") if values else text


def _env(node: Node) -> Iterator[GivenVariable]:
    """A map, a list of ``NAME=value``, or Kubernetes' list of ``name`` and ``value``."""
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield GivenVariable(name=key.value, value=str(value.value), line=_line(key))
    elif isinstance(node, SequenceNode):
        for item in node.value:
            if isinstance(item, ScalarNode):
                key, _, value = item.value.partition("=")
                yield GivenVariable(name=key, value=value, line=_line(item))
            elif isinstance(item, MappingNode):
                pairs = dict(_pairs(item))
                if "name" in pairs:
                    value = pairs.get("value", UNKNOWN)
                    yield GivenVariable(name=pairs["name"], value=value, line=_line(item))


def _pairs(node: Node) -> Iterator[tuple[str, str]]:
    from yaml.nodes import MappingNode, ScalarNode

    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(value, ScalarNode):
                yield key.value, value.value


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
