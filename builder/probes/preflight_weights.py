"""Lets a release load the weights of a checkpoint by name: its own loader, tensors without values.

Part of the preflight probe: it runs under the target's interpreter, with the standard library, its
siblings and the target's packages.  Of each safetensors file only the header is here: the name, the
dtype and the shape of each tensor.  The release's own loader chooses the files, reads them with
`File` in place of ``safe_open``, gives the tensors to the model, and checks itself which parameters
got none.
"""

from __future__ import annotations

import functools
import glob
import importlib
import json
import os
import re
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Json = dict[str, Any]
#: What makes JSON of an error at a stage.
Failure = Callable[[BaseException, str], Json]
#: The tensors of one file by name: each has ``dtype`` and ``shape``.
Header = dict[str, dict[str, Any]]

#: What the answer about loading has.
LOADING: Json = {
    "part": "model", "tensors": 0, "refusal": None, "not_asked": "", "tensor": "",
    "without_weight": [], "without_weight_total": 0,
}  # fmt: skip
#: Names of parameters that are shown.
MOST_NAMES = 20
#: The names of dtypes of safetensors, and torch's.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
#: What stands before an expert's number in a tensor's name.
EXPERTS = ".experts."
#: Scales and zero points of attention, which a checkpoint may lack.
OPTIONAL = re.compile(r"\.(q|k|v|prob)_(scale|zero_point)$")
#: Functions of torch that write into their first argument.
WRITES = re.compile(r"(copy|fill|zero|index_\w+|masked_\w+|scatter\w*|add|mul|set)_")
#: A parameter of one of several experts.
OWN_EXPERT = re.compile(r"experts?\.\d+\.")
#: A name with the number of a layer or a block.
NUMBERED = re.compile(r"(layers|blocks|h)\.\d+\.")
#: What an assertion about the shape of a tensor has.
SHAPE = re.compile(r"\.shape\b|\.size\(|torch\.Size")
#: Characters of an error's text that are looked at, and shown.
MOST_CHARACTERS = 1000
#: What a release's loader raises on purpose about a name or a shape.
REFUSALS = (ValueError, KeyError, AssertionError)


class NotAskedError(Exception):
    """The release's loader cannot be asked here; the message says why."""


def header_of(path: str) -> Header:
    """The tensors of a safetensors file.

    Raises:
        NotAskedError: its header is malformed.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: Header = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        if all(
            type(one["dtype"]) is str and type(one["shape"]) is list for one in entries.values()
        ):
            return entries
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotAskedError(f"{os.path.basename(path)}: its header is malformed") from error
    raise NotAskedError(f"{os.path.basename(path)}: its header is malformed")


def repeated_experts(headers: Iterable[Header]) -> set[str]:
    """The tensors of experts between the first and the last of a layer that are as the first.

    Experts share parameters, so these show nothing that the first and the last do not.
    """
    layers: dict[str, dict[int, dict[str, Any]]] = {}
    for header in headers:
        for name, entry in header.items():
            layer, found, rest = name.partition(EXPERTS)
            number, _, rest = rest.partition(".")
            if found and number.isdecimal() and len(number) < 10:
                experts = layers.setdefault(layer, {})
                experts.setdefault(int(number), {})[rest] = (entry["dtype"], entry["shape"])
    return {
        f"{layer}{EXPERTS}{expert}.{rest}"
        for layer, experts in layers.items()
        for first, last in [(min(experts), max(experts))]
        for expert, tensors in experts.items()
        if first < expert < last and tensors == experts[first]
        for rest in tensors
    }


class Checkpoint:
    """The tensors of a folder, by the headers of its files."""

    def __init__(self, folder: str) -> None:
        files = glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))
        self.headers = {file: header_of(file) for file in sorted(files)}
        self.tensors = sum(map(len, self.headers.values()))
        self.repeated = repeated_experts(self.headers.values())
        #: the tensor that was read last
        self.last = ""

    def described(self) -> str:
        """The tensor that was read last, with its dtype and shape."""
        for header in self.headers.values():
            if self.last in header:
                entry = header[self.last]
                form = f"{entry['dtype']} {entry['shape']}"
                return f"{self.last} ({form})"[:MOST_CHARACTERS]
        return self.last

    def open(self, path: object, *_args: object, **_options: object) -> File:
        """In place of ``safe_open``."""
        name = str(path)
        return File(self, self.headers.get(name) or header_of(name))


checkpoint_of = functools.cache(Checkpoint)


class File:
    """A safetensors file as ``safe_open`` gives it; its tensors have no values."""

    def __init__(self, checkpoint: Checkpoint, header: Header) -> None:
        self.checkpoint, self.header = checkpoint, header

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        """Each of its tensors was taken, unless an error ends the loading."""
        if kind is None:
            self.checkpoint.last = ""

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return sorted(set(self.header) - self.checkpoint.repeated)

    def get_tensor(self, name: str) -> Any:
        """A tensor without values; a single value is 1, because loaders read it."""
        torch: Any = importlib.import_module("torch")
        dtype, shape = self.header[name]["dtype"], self.header[name]["shape"]
        self.checkpoint.last = name
        kind = getattr(torch, DTYPES.get(dtype, ""), None)
        if kind is None:
            raise NotAskedError(f"tensors of dtype {dtype} are not made here")
        if all(size == 1 for size in shape):
            return torch.ones(shape, device="cpu").to(kind)
        return torch.empty(shape, dtype=kind, device="meta")


def load(config: Any, model: Any, model_config: Any, checkpoint: Checkpoint) -> list[str]:
    """Let the release load a checkpoint; the parameters into which it wrote nothing.

    Whatever the release raises is passed on.

    Raises:
        NotAskedError: another loader than the release's usual one would run.
    """
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    utilities: Any = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
    usual = importlib.import_module("vllm.model_executor.model_loader.default_loader")
    loader = loaders.get_model_loader(config.load_config)
    if type(loader) is not usual.DefaultModelLoader:
        load_format = getattr(config.load_config, "load_format", "")
        raise NotAskedError(f"--load-format {load_format} has a loader of its own")
    vars(utilities)["safe_open"]  # a release that reads in another way is not asked
    utilities.safe_open = checkpoint.open
    written: set[int] = set()
    with watched(written):
        loader.load_weights(model, model_config)
    return sorted(
        name
        for name, parameter in model.named_parameters()
        if storage_of(parameter) not in written and not OPTIONAL.search(name)
    )


def storage_of(tensor: Any) -> int:
    """The memory that a tensor and its views share, also if it has no values."""
    return int(tensor.untyped_storage()._cdata)


def watched(written: set[int]) -> Any:
    """A mode that notes into which memory something is written.

    The names that a release's loaders return are not those of the parameters in each release.
    """
    torch: Any = importlib.import_module("torch")
    mode: Any = importlib.import_module("torch.overrides").TorchFunctionMode

    class Watch(mode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            writes = name in ("__setitem__", "__set__") or WRITES.fullmatch(name)
            if writes and isinstance(args[0], torch.Tensor):  # its memory may be another now
                written.add(storage_of(args[0]))
            return result

    return Watch()


def loading(
    config: Any, model: Any, model_config: Any, checkpoint: Checkpoint, failure: Failure
) -> Json:
    """What the release says when it loads a checkpoint.

    Experts that are as the first are left out.  If the release then refuses, it loads all of them:
    only an error that does not depend on it counts.
    """
    if any(OWN_EXPERT.search(name) for name, _ in model.named_parameters()):
        checkpoint.repeated = set()
    first = attempt(config, model, model_config, checkpoint, failure)
    if "refusal" not in first or not checkpoint.repeated:
        return first
    checkpoint.repeated = set()
    second = attempt(config, model, model_config, checkpoint, failure)
    places = [one["refusal"]["where"] for one in (first, second) if "refusal" in one]
    if len(set(places)) == 2:
        return {"not_asked": f"it ended in two ways: {' and '.join(places)}"}
    return second


def attempt(
    config: Any, model: Any, model_config: Any, checkpoint: Checkpoint, failure: Failure
) -> Json:
    """One attempt to load a checkpoint: the parameters that got nothing, or how it ended."""
    checkpoint.last = ""
    try:
        missing = load(config, model, model_config, checkpoint)
    except NotAskedError as error:
        return {"not_asked": str(error)}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return refused(error, failure(error, "loading"), model, checkpoint)
    return {"without_weight": missing[:MOST_NAMES], "without_weight_total": len(missing)}


def refused(error: BaseException, failed: Json, model: Any, checkpoint: Checkpoint) -> Json:
    """The part of the answer about an error: the release's refusal, or why it is none."""
    frames = traceback.extract_tb(error.__traceback__)
    line = str(frames[-1].line) if frames else ""
    failed = {**failed, "message": failed["message"] or line}
    tensor = checkpoint.described()
    why = doubt(error, line, failed, model, checkpoint)
    if not why:
        return {"refusal": failed, "tensor": tensor}
    first = failed["message"].strip().partition("\n")[0][:MOST_CHARACTERS]
    return {"not_asked": f"{why} ({failed['type']}: {first}; {failed['where']})", "tensor": tensor}


def doubt(error: BaseException, line: str, failed: Json, model: Any, checkpoint: Checkpoint) -> str:
    """Why an error is no refusal of a tensor's name or shape; empty if it is one.

    It is one only if the release's own code raises it on purpose, about a name that the model or
    the checkpoint has, or about the shape of the tensor that it read last.
    """
    on_purpose = type(error) in REFUSALS or (
        type(error) is AttributeError and line.startswith("raise ")
    )
    if "/vllm/" not in failed["innermost"] or not on_purpose:
        return "it ended with an error that need not be the release's"
    if isinstance(error, AssertionError):
        about = checkpoint.last and SHAPE.search(f"{error} {line}")
        return "" if about else "it ended with an assertion that is not about a shape"
    named = names_in(str(error), model, checkpoint)
    if not named:
        return "it ended with an error that names no tensor"
    others = {owner for name in named for owner in owners(model, name, str(error))}
    return "it ended in a part that Transformers makes" if "transformers" in others else ""


def names_in(text: str, model: Any, checkpoint: Checkpoint) -> list[str]:
    """The names of tensors, parameters and modules in the beginning of an error's text."""
    known = [name for name, _ in model.named_parameters()]
    known += [name for header in checkpoint.headers.values() for name in header]
    quoted = re.findall(r"['\"]([\w.]+)['\"]", text[:MOST_CHARACTERS])
    dotted = re.findall(r"\w+(?:\.\w+)+", text[:MOST_CHARACTERS])
    return [
        word
        for word in dict.fromkeys([*quoted, *dotted])
        if NUMBERED.search(word) or any(is_part(word, name) for name in known)
    ]


def is_part(word: str, name: str) -> bool:
    """Whether a word is a name, its beginning, or more than a name's last part at its end."""
    ends = "." in word and name.endswith(f".{word}")
    return ends or name == word or name.startswith(f"{word}.")


def owners(model: Any, name: str, text: str) -> set[str]:
    """The packages whose modules are on the way to a name, as far as the model has it.

    A text may say from which kind of module the name leads: ``named 'layers.0.x' in LlamaModel``.
    """
    kinds = set(re.findall(r"\bin (\w+)", text[:MOST_CHARACTERS]))
    starts = [module for module in model.modules() if type(module).__name__ in kinds] or [model]
    found = set()
    for module in starts:
        for part in (*name.split("."), ""):
            found.add(type(module).__module__.partition(".")[0])
            module = module._modules.get(part)
            if module is None:
                break
    return found
