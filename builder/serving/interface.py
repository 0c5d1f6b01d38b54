"""What ``vllm serve`` of one release accepts: flags, environment variables, parser names.

Everything is read from the release's source; nothing is imported or run.
"""

from __future__ import annotations

import ast
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.applier.environment import read_envs
from builder.common.console import console
from builder.common.document import Part, Sha256, Text
from builder.common.pypi.index import PackageIndex
from builder.errors import UsageError, did_you_mean
from builder.images.bases.identify import identify
from builder.images.bases.model import BaseRequest
from builder.layers.plan.sources import preload
from builder.proof.results import Results
from builder.serving.flags import FlagReader, RawFlag
from builder.serving.hints import Takes
from builder.serving.modules import Modules
from builder.serving.values import NONE, Key, Kind, in_json, shortened, wrong_key, wrong_kind

if TYPE_CHECKING:
    from builder.applier.trees import Tree
    from builder.serving.modules import ReadFile

#: Files that are fetched together first, if a release has them: those that were read
#: of the releases from 0.17.0 to 0.33.0, besides all of ``vllm/config``.
FIRST = (
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/anthropic/protocol.py",
    "vllm/entrypoints/chat_utils.py",
    "vllm/entrypoints/cli/serve.py",
    "vllm/entrypoints/common/cli_args.py",
    "vllm/entrypoints/launchers/cli_args.py",
    "vllm/entrypoints/openai/cli_args.py",
    "vllm/entrypoints/openai/models/protocol.py",
    "vllm/envs.py",
    "vllm/reasoning/__init__.py",
    "vllm/renderers/chat_utils/__init__.py",
    "vllm/renderers/chat_utils/types.py",
    "vllm/tool_parsers/__init__.py",
    "vllm/tool_parsers/tool_strict_level.py",
    "vllm/transformers_utils/config.py",
    "vllm/utils/argparse_utils.py",
    "vllm/v1/attention/backends/mla/prefill/registry.py",
    "vllm/v1/attention/backends/registry.py",
)
_CONFIG = "vllm/config"
#: The modules and tables in which releases register parsers.
_REASONING = ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")
_TOOLS = ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
#: Flags that take the name of a parser, and the flag for a plugin from the checkpoint.
REASONING_FLAG, TOOL_FLAG = "--reasoning-parser", "--tool-call-parser"
PLUGINS = {REASONING_FLAG: "--reasoning-parser-plugin", TOOL_FLAG: "--tool-parser-plugin"}
#: Values that mean no parser.
_NO_PARSER = ("", "none")
#: vLLM's variables begin with this; vLLM warns about unknown ones.
VARIABLES = "VLLM_"


class Flag(Part, frozen=True, kw_only=True):
    """One flag of ``vllm serve``."""

    names: Annotated[tuple[Text, ...], Meta(description="the long name first")]
    takes: Annotated[Takes, Meta(description="how many words follow; a number is exactly that")]
    kind: Kind
    choices: Annotated[
        tuple[str, ...], Meta(description="the only valid values, if the release checks them")
    ] = ()
    known: Annotated[
        tuple[str, ...], Meta(description="values that the release knows, if it accepts others too")
    ] = ()
    folds: Annotated[bool, Meta(description="case and hyphens of a value are ignored")] = False
    nullable: Annotated[bool, Meta(description="an empty word and None are no value")] = False
    off: Annotated[tuple[Text, ...], Meta(description="names that switch it off")] = ()
    keys: Annotated[
        tuple[Key, ...], Meta(description="of an object, where it is that of a configuration class")
    ] = ()
    deprecated: Annotated[
        str, Meta(description="the release's notice of deprecation or removal")
    ] = ""

    @classmethod
    def of(cls, raw: RawFlag) -> Flag:
        """Convert a flag from the reader."""
        words = raw.words
        ordered = sorted(raw.names, key=lambda name: not name.startswith("--"))
        return cls(
            names=tuple(ordered), takes=words.takes, kind=words.kind, choices=words.choices,
            known=words.known, folds=words.folds, nullable=words.nullable, off=raw.off,
            keys=words.keys, deprecated=raw.deprecated,
        )  # fmt: skip

    def refusal(self, value: str | None) -> str:
        """Why the release's parser would refuse this value; empty if it accepts it.

        The model or the machine may still refuse a value that the parser accepts.
        """
        if self.takes == "nothing":
            return "" if value is None else "takes no value"
        if value is None:
            return "" if self.takes == "optional" else "needs a value"
        if self.choices and self.folded(value) not in self.choices:
            return _not_among(value, self.choices)
        if self.known and not self._may_be(value):
            return _not_among(value, self.known)
        return self._not_of_its_kind(value) if self.takes in ("one", "optional") else ""

    def _not_of_its_kind(self, value: str) -> str:
        wanted = wrong_kind(self.kind, value, nullable=self.nullable)
        return (
            f"takes {wanted}, not {shortened(value)!r}"
            if wanted
            else wrong_key(self.keys, in_json(value))
        )

    def key_refusal(self, path: str, value: str | None) -> str:
        """The same for one key of an object: ``--kernel-config.linear_backend VALUE``."""
        if self.kind not in ("json", "object"):  # the parser makes JSON of the keys: a text too
            return "takes no keys" if self.refusal("{}") else ""
        nested: object = None if value is None else in_json(value)
        for key in reversed(path.removesuffix("+").split(".")):
            nested = {key: nested}
        return wrong_key(self.keys, nested)

    def _may_be(self, value: str) -> bool:
        """Whether it may be a known value, or the path of a class."""
        if (self.nullable and value in NONE) or set(value) & set("./:"):
            return True
        return value.lower() in {known.lower() for known in self.known}

    def folded(self, value: str) -> str:
        """A value as vLLM normalises it: ``--moe-backend`` accepts flashinfer-b12x too."""
        return value.lower().replace("-", "_") if self.folds else value


def _not_among(value: str, known: tuple[str, ...]) -> str:
    guess = did_you_mean(value, known)
    return f"has no value {shortened(value)!r}{guess} (it has {', '.join(known)})"


class ServeInterface(Part, frozen=True, kw_only=True, dict=True):
    """What ``vllm serve`` of one release accepts."""

    vllm: Text
    flags: tuple[Flag, ...]
    variables: Annotated[
        dict[str, tuple[str, ...]],
        Meta(description="names that envs.py reads, with the values that it accepts; none: any"),
    ]
    reasoning_parsers: tuple[str, ...]
    tool_parsers: tuple[str, ...]

    def flag(self, name: str) -> Flag | None:
        """A flag by one of its names; like vLLM, this reads underscores as hyphens."""
        return self._by_name.get(canonical(name) if name.startswith("--") else name)

    @cached_property
    def _by_name(self) -> dict[str, Flag]:
        return {name: flag for flag in reversed(self.flags) for name in flag.names}

    def refusal(self, name: str, value: str | None) -> str:
        """Why this release would refuse a flag with this value; empty if it accepts it."""
        plain, _, key = canonical(name).partition(".")
        found = self.flag(plain)
        if found is None:
            guess = did_you_mean(name, self._by_name)
            return f"vLLM {self.vllm} has no flag {shortened(name)}{guess}"
        if key:  # --kernel-config.linear_backend VALUE
            why = found.key_refusal(key, value)
            return f"{plain} of vLLM {self.vllm} {why}" if why else ""
        why = found.refusal(value)
        return f"{shortened(name)} of vLLM {self.vllm} {why}" if why else ""

    def variable_refusal(self, name: str, value: str) -> str:
        """Why this release would ignore a variable; empty if it reads it, or it is not vLLM's."""
        if not name.startswith(VARIABLES):
            return ""
        if name not in self.variables:
            guess = did_you_mean(name, self.variables)
            return f"vLLM {self.vllm} does not read the variable {shortened(name)}{guess}"
        choices = self.variables[name]
        wrong = [one for one in value.split(",") if choices and one not in choices]
        if wrong:
            value = shortened(wrong[0])
            return f"{name} of vLLM {self.vllm} has no value {value!r} ({', '.join(choices)})"
        return ""

    def parser_refusal(self, flag: str, value: str) -> str:
        """Why no built-in parser has this name; empty if one has, or for other flags."""
        built_in = self.parsers(flag)
        if not built_in or value in built_in or value.lower() in _NO_PARSER:
            return ""
        guess = did_you_mean(value, built_in)
        return f"vLLM {self.vllm} has no parser {shortened(value)!r} for {flag}{guess}"

    def parsers(self, flag: str) -> tuple[str, ...]:
        """The built-in parsers that a flag chooses from."""
        return {REASONING_FLAG: self.reasoning_parsers, TOOL_FLAG: self.tool_parsers}.get(flag, ())


def canonical(name: str) -> str:
    """A long flag in the spelling of vLLM's parser: hyphens up to the first dot."""
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


class _Kept(Part, frozen=True, kw_only=True):
    """A cached interface of a release, and the files that it was read from."""

    interface: ServeInterface
    files: Annotated[
        dict[str, Sha256 | None],
        Meta(description="sha256 of each file that was read, null of one that is not there"),
    ]


#: Cached by the release's first files and by the programs that read them; one is 60 kB.
_RESULTS = Results(
    "interfaces",
    (
        *(
            ("serving", f"{name}.py")
            for name in ("interface", "flags", "hints", "modules", "values")
        ),
        ("applier", "environment.py"),
    ),
    200,
)


def interface_in(tree: Tree, vllm: str) -> ServeInterface:
    """The interface of the vLLM in a tree; cached by its files.

    Raises:
        UsageError: the release builds its parser in an unknown way.
        RemoteError: the package index or the registry does not answer.
    """
    config = [f"{_CONFIG}/{name}" for name in tree.children(_CONFIG) if name.endswith(".py")]
    first = [*FIRST, *config]
    inputs = [vllm, [[path, tree.digest(path)] for path in first]]
    before = _RESULTS.get(inputs, _Kept)
    if before and all(tree.digest(path) == digest for path, digest in before.files.items()):
        return before.interface
    digests: dict[str, str | None] = {}

    def noted(path: str) -> bytes | None:
        digests[path] = tree.digest(path)
        return tree.read(path)

    with console.progress(f"reading the arguments of vLLM {vllm}", unit="", whole=True):
        preload(tree, first)
        interface = read_interface(noted, vllm)
    _RESULTS.put(inputs, _Kept(interface=interface, files=digests))
    return interface


def read_interface(read: ReadFile, vllm: str) -> ServeInterface:
    """Read the interface from a release's files.

    Raises:
        UsageError: the release builds its parser in an unknown way.
    """
    modules = Modules(read)
    known = read_envs(modules.needed("vllm.envs").source).known
    return ServeInterface(
        vllm=vllm,
        flags=tuple(map(Flag.of, FlagReader(modules).read())),
        variables={name: choices or () for name, choices in sorted(known.items())},
        reasoning_parsers=_registered(modules, *_REASONING),
        tool_parsers=_registered(modules, *_TOOLS),
    )


def interface_of(ref: str) -> ServeInterface:
    """The interface of the vLLM of a base: ``pypi:vllm==0.33.0``, an image, a layout.

    Raises:
        SparkBuildError: it is not a base with vLLM, or it cannot be read.
    """
    index = PackageIndex()
    base = identify(BaseRequest(ref=ref, pins={}, tracked=("vllm",), index=index))
    try:
        return interface_in(base.tree, base.identity.packages["vllm"])
    finally:
        base.close()


def _registered(modules: Modules, module: str, table: str) -> tuple[str, ...]:
    """The keys of a table of parsers.

    Raises:
        UsageError: there is no such table.
    """
    found = modules.needed(module).names.get(table)
    value = getattr(found, "value", None)
    keys = value.keys if isinstance(value, ast.Dict) else ()
    names = sorted(str(key.value) for key in keys if isinstance(key, ast.Constant))
    if not names:
        raise UsageError(f"{module} of this vLLM has no table {table}: its parsers are unknown")
    return tuple(names)
