"""Calls of the package ``b12x``, which vLLM can use instead of FlashInfer's kernels of that name.

Runs under the target's interpreter beside ``launch_probe.py``.  The package asks each tensor
whether it is on the device, and allocates there: both are answered with ordinary memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

from builder.probes import codegen_probe, device_cases, host_triton, launch_cases
from builder.probes import nvfp4_reference as reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.probes.launch_cases import Case

torch: Any = importlib.import_module("torch")
overrides: Any = importlib.import_module("torch.overrides")

#: The device that every tensor says it is on.
CUDA = torch.device("cuda", 0)


class OrdinaryMemory(overrides.TorchFunctionMode):  # type: ignore[misc]
    """Every tensor says it is on the device; what is to be made there is made elsewhere."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer for one function of torch."""
        if function == torch.Tensor.device.__get__:
            device = function(*args)
            return CUDA if device.type == "cpu" else device
        if function == torch.Tensor.is_cuda.__get__:
            return not args[0].is_meta
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        options = {name: on_host(value) for name, value in (kwargs or {}).items()}
        return function(*map(on_host, args), **options)


def on_host(value: Any) -> Any:
    """Ordinary memory in the place of the device; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return torch.device("cpu")
    return value


def kept_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs with every tensor on the device: an operator's own code leaves that."""

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with OrdinaryMemory():
            return function(*args, **kwargs)

    return inside


def ready(probe: Any) -> Any:
    """The package's GEMM, told that a device is there; what a call needs it prepares by itself.

    It stays so to the end of the process.
    """
    probe.note("package b12x: its tensors are in host memory and report a CUDA device")
    return _imported()


@functools.cache
def _imported() -> Any:
    api = codegen_probe.import_package({"stand_in": True}, session=True)
    with contextlib.suppress(ImportError):  # from 1.5 on
        types = importlib.import_module("b12x.preparation.types")
        types._set_lazy_preparer(functools.partial(prepare, types))
    triton: Any = importlib.import_module("triton")
    if isinstance(triton, codegen_probe.StubModule):
        triton.__dict__["cdiv"] = lambda a, b: -(-a // b)
        triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)  # it is looked for
    for name in WANTED:
        with contextlib.suppress(ModuleNotFoundError):  # of another release
            importlib.import_module(name)
    experts: Any = importlib.import_module("b12x.moe.fused_moe._impl")
    with contextlib.suppress(ModuleNotFoundError):
        packing = importlib.import_module("b12x.moe._shared.kernels.w4a16.route_pack")
        host_triton.run_on_host(packing)
    experts._compiled_direct_micro_accepts_block_dim = launch_cases.accepts_block
    keep_operators_inside()
    return api


#: What vLLM looks for, with Triton there, or else would take for absent; and the package's
#: operators, which it would import when they are called.
WANTED = (
    "b12x.gemm.blockscaled",
    "b12x._lib.intrinsics",
    "b12x.moe.fused_moe",
    "b12x.moe.fused_moe._impl",
    "b12x.gemm.blockscaled._ops",
    "b12x.moe._shared.kernels.w4a16.kernel",
)


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Let vLLM be imported without the stand-in for Triton that the package was imported with."""
    names = codegen_probe.PACKAGE_TRITON
    stand_ins = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.modules.update(stand_ins)


def keep_operators_inside() -> None:
    """Let the code of the package's operators ask as its other code does."""
    known = importlib.import_module("torch._library.custom_ops").OPDEFS
    for name, operator in known.items():
        if name.startswith("b12x::"):
            functions = operator._backend_fns
            functions.update({kind: kept_inside(function) for kind, function in functions.items()})


def prepare(types: Any, plan: Any) -> Any:
    """What the package's session does for a plan that is used before it was prepared.

    The session also starts compilers, measures, and counts memory, for which it needs the driver.
    """
    detect = importlib.import_module("b12x.preparation.device").detect_device
    device = detect(CUDA)
    choice = plan.contract.configure(plan.query, device=device.identity, override=plan.override)
    config = choice.default if choice.pinned is None else choice.pinned
    query = types.FrozenMapping(plan.contract.encode_query(plan.query))
    selection = types.Selection(plan.component_id, query, config, "default")
    with types._plan_scope(plan):
        state = plan._materialize(selection, device)
    prepared = types._Prepared(state, selection, frozenset(), None, (), (), device)
    plan._install(prepared)
    return prepared


def dense_cases(ask: dict[str, Any], probe: Any) -> Iterator[Case]:
    """Calls of the package's GEMM of FP4 activations and weights, as vLLM makes them."""
    api = ready(probe)
    for m, n, k in ask["shapes"]:
        draw = launch_cases.ExactCases("fp4", seed=int(ask.get("seed", 0)))
        for case in launch_cases.linear(draw, ask.get("inputs", "random"), m, n, k):
            yield _dense(api, case)


def _dense(api: Any, case: Any) -> Any:
    left, right = reference.quantise(case.x, case.input_scale), case.weight
    a, b = reference.pack(left.codes).contiguous(), reference.pack(right.codes).contiguous()
    e4m3 = torch.float8_e4m3fn
    scales = [launch_cases.swizzled(one.scales).view(e4m3) for one in (left, right)]
    alpha = torch.tensor([left.factor * right.factor], dtype=torch.float32)
    exact = case.expected.exact
    launched = launch_cases.Case(
        f"{case.name}, {case.shape}", None, [a, b, *scales, alpha], None, exact, case.expected.bound
    )

    def call() -> None:
        with OrdinaryMemory():
            launched.output = api.mm_nvfp4(
                a, scales[0], b, scales[1], alpha, out_dtype=torch.bfloat16
            )

    launched.call = call
    return launched


@functools.cache
def handed_gemm() -> HandedGemm:
    """The one of this process."""
    return HandedGemm()


@functools.cache
def handed_experts() -> HandedExperts:
    """The one of this process."""
    return HandedExperts()


class HandedGemm:
    """Listens at the package's two GEMMs: what vLLM hands to them are the inputs of the case."""

    name = "b12x.gemm.blockscaled"

    def __init__(self) -> None:
        self.case: Any = None
        self.called = False
        gemm: Any = importlib.import_module(self.name)
        for name in ("mm_nvfp4", "mm"):  # vLLM looks them up when it calls them
            setattr(gemm, name, self._listening(getattr(gemm, name)))

    def _listening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def listening(*args: Any, **kwargs: Any) -> Any:
            self.called = True
            parts = [
                part for given in args for part in (given, *getattr(given, "__dict__", {}).values())
            ]
            self.case.inputs = [part for part in parts if isinstance(part, torch.Tensor)]
            self.case.output = original(*args, **kwargs)
            return self.case.output

        return listening


class HandedExperts:
    """Listens at the package's fused experts, which vLLM gives a binding of its tensors."""

    def __init__(self) -> None:
        self.case: Any = None
        self.called = ""
        experts: Any = importlib.import_module("b12x.moe.fused_moe")
        self._run = experts.run
        experts.run = self._listening  # vLLM looks it up when it calls it
        layer: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.b12x")
        for name in ("apply", "workspace_shapes"):  # called in an operator of vLLM's
            function = getattr(layer.B12xExperts, name)
            setattr(layer.B12xExperts, name, kept_inside(function))

    def _listening(self, *, binding: Any) -> Any:
        self.called = "b12x.moe.fused_moe.run"
        experts = vars(binding.experts).values()
        given = [binding.a, binding.topk_weights, binding.topk_ids, *experts]
        self.case.inputs = [one for one in given if isinstance(one, torch.Tensor)]
        self.case.output = binding.output
        binding.output.fill_(float("nan"))
        return self._run(binding=binding)


def a16_cases(ask: dict[str, Any], probe: Any) -> Iterator[Case]:
    """Calls of the package's GEMM of bfloat16 activations and FP4 weights, as vLLM makes them."""
    api = ready(probe)
    for m, n, k in ask["shapes"]:
        draw = device_cases.LinearCases("bf16", seed=int(ask.get("seed", 0)))
        for case in launch_cases.linear(draw, ask.get("inputs", "random"), m, n, k):
            yield _a16(api, case)


def _a16(api: Any, case: Any) -> Any:
    weight, exact = case.weight, case.expected.exact
    values = reference.pack(weight.codes).contiguous()
    scales = launch_cases.swizzled(weight.scales).view(torch.float8_e4m3fn)
    factor = torch.tensor(weight.factor, dtype=torch.float32)
    given = [case.x, values, scales, factor]
    name = f"{case.name}, {case.shape}"
    launched = launch_cases.Case(name, None, given, None, exact, case.expected.bound)

    def call() -> None:
        with OrdinaryMemory():
            packed = api.pack_weight(values, scales, recipe="nvfp4", global_scale=factor)
            launched.output = api.mm(case.x, packed, required_mode="a16")

    launched.call = call
    return launched


KINDS = {"package-dense": dense_cases, "package-dense-a16": a16_cases}
