"""Records the launches of a kernel's host code: PTX, parameters, and the memory behind them.

Runs under the target's interpreter beside ``launch_probe.py``; standard library, and torch and
tvm_ffi where it is used.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.probes import launch_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: Version of ``launch.json``.
SCHEMA = 1
Json = dict[str, Any]


class Recorder:
    """Writes each launch of a request."""

    def __init__(self) -> None:
        #: the compiler's output for the running function
        self.ptx: list[str] = []
        self.begin(Path())

    def begin(self, folder: Path) -> None:
        """Start recording another request."""
        self.folder = folder
        self.case: Any = None
        self.number = 0
        self.launches: list[Json] = []
        self._pending: list[tuple[Path, Json]] = []

    def record(self, launched: launch_host.Launched) -> None:
        """Record one launch of the current case."""
        # tensors may answer for the device to whoever asks
        with importlib.import_module("torch")._C.DisableTorchFunction():
            self._record(launched)

    def _record(self, launched: launch_host.Launched) -> None:
        text = next(t for t in self.ptx if f".entry {launched.kernel}(" in t)
        parts = launch_host.parameters(text, launched)
        into = self.folder / f"launch-{self.number}"
        self.number += 1
        into.mkdir(parents=True)
        (into / "kernel.ptx").write_text(text, encoding="utf-8")
        document = {
            "schema": SCHEMA,
            "name": self.case.name,
            "ptx": "kernel.ptx",
            "kernel": launched.kernel,
            "grid": launched.grid,
            "block": launched.block,
            "shared": launched.shared,
            "parameters": [part.hex() for part in parts],
            "memory": self._memory(into, b"".join(parts)),
        }
        self._pending.append((into, document))

    def finish_call(self) -> bool:
        """Write the launches of the call; return whether there were any."""
        pending, self._pending = self._pending, []
        if not pending:
            return False
        into, last = pending[-1]
        last["result"] = self._result(into)
        for folder, document in pending:
            (folder / "launch.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        folders = [str(folder) for folder, _ in pending]
        self.launches.append({"name": self.case.name, "folders": folders})
        return True

    def _memory(self, into: Path, parameters: bytes) -> list[Json]:
        """The memory of every tensor that a parameter or a tensor map points into."""
        torch = importlib.import_module("torch")
        held = {
            int.from_bytes(parameters[at : at + 8], "little")
            for at in range(0, len(parameters) - 7, 4)
        }
        inputs = {t.untyped_storage().data_ptr() for t in self.case.inputs}
        kinds = {torch.Tensor, *subclasses(torch.Tensor)}
        tensors: list[Any] = [held for held in gc.get_objects() if type(held) in kinds]
        stores = {}
        for one in tensors:
            if one.device.type == "cpu":
                storage = one.untyped_storage()
                stores[storage.data_ptr()] = storage
        found: list[Json] = []
        for address, storage in sorted(stores.items()):
            end = address + storage.nbytes()
            if address and any(address <= value < end for value in held):
                file = f"memory-{len(found)}.bin"
                (into / file).write_bytes(ctypes.string_at(address, storage.nbytes()))
                found.append({"address": address, "file": file, "writable": address not in inputs})
        return found

    def _result(self, into: Path) -> Json:
        case = self.case
        for name, values in (("exact", case.exact), ("bound", case.bound)):
            (into / f"{name}.f64").write_bytes(values.double().contiguous().numpy().tobytes())
        shape = [int(size) for size in case.output.shape]
        return {
            "address": case.output.data_ptr(),
            "type": "bf16",
            "shape": shape,
            "exact": "exact.f64",
            "bound": "bound.f64",
        }


def subclasses(kind: type) -> Iterator[type]:
    """All classes below another."""
    direct: list[type] = type.__subclasses__(kind)
    for one in direct:
        yield one
        yield from subclasses(one)


class Compiling:
    """``cute.compile``, whose functions can be called with tensors in ordinary memory.

    Options in brackets give another instance, as for the DSL's own.
    """

    def __init__(self, compiler: Any, recorder: Recorder, plain: type) -> None:
        self._compiler, self._recorder, self._plain = compiler, recorder, plain

    def __getitem__(self, options: Any) -> Compiling:
        return Compiling(self._compiler[options], self._recorder, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Call the compiled function, after passing its PTX to the recorder."""
        before = set(Path().glob("*.ptx"))
        function = self._compiler(*args, **kwargs)
        new = sorted(set(Path().glob("*.ptx")) - before)
        texts = [launch_host.short_names(path.read_text("utf-8"), sys.path) for path in new]
        for path in new:  # the next one may have the same name
            path.unlink()

        def call(*values: Any) -> Any:
            self._recorder.ptx = texts
            # without TVM FFI nothing checks a tensor's device
            plain = type(function) is self._plain
            return function(*map(in_memory if plain else on_device, values))

        call.ptx = texts  # type: ignore[attr-defined]
        return call


def in_memory(value: Any) -> Any:
    """A plain tensor for a tensor of our classes; anything else unchanged."""
    tensor = importlib.import_module("torch").Tensor
    return value.as_subclass(tensor) if isinstance(value, tensor) else value


def on_device(value: Any) -> Any:
    """A tensor that reports to be on the device; anything else unchanged."""
    value = in_memory(value)
    if isinstance(value, importlib.import_module("torch").Tensor):
        return importlib.import_module("tvm_ffi").from_dlpack(launch_host.OnDevice(value))
    return value
