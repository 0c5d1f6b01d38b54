"""Lets a release size its KV cache for a model that was built: its own blocks, groups and refusal.

Part of the preflight probe: it runs under the target's interpreter, with the standard library, its
siblings and the target's packages.  The release's own functions decide; what they cannot know
without a GPU is given with the question: how much memory the device has, how much of it is free,
and how much activations and CUDA graphs take.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Json = dict[str, Any]

#: What the answer about memory has.  Bytes are those of one rank.
MEMORY: Json = {
    "refusal": None,
    "requested_bytes": 0,
    "overhead_bytes": 0,
    "available_bytes": 0,
    "block_tokens": 0,
    "context": 0,
    "groups": [],
    "blocks": 0,
    "concurrency": 0.0,
    "request_bytes": 0,
    "longest": {},
}
#: Bytes with which a cache is sized to learn what one request takes, whatever is free.
PLENTY = 1 << 44
#: Where releases plan the KV cache; the newest first.
PLANNING = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")


class Release:
    """The functions of a release that size a KV cache."""

    def __init__(self) -> None:
        for name in PLANNING:
            with contextlib.suppress(ImportError):
                self.planning: Any = importlib.import_module(name)
                break
        else:
            raise ImportError(f"none of {', '.join(PLANNING)}")
        self.utilities: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self.worker: Any = importlib.import_module("vllm.v1.worker.utils")
        self.platform: Any = importlib.import_module("vllm.platforms").current_platform

    def specs(self, config: Any) -> dict[str, Any]:
        """The cache of each layer, after the block size was chosen as a worker chooses it."""
        update = getattr(self.platform, "update_block_size_for_backend", None)
        if update is not None:  # older releases choose it with the configuration
            update(config)
        manager: Any = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
        register = getattr(manager, "register_all_kvcache_specs", None)
        if register is not None:
            register(config)
        found = {}
        for name, layer in config.compilation_config.static_forward_context.items():
            spec = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") else None
            if spec is not None:
                found[name] = spec
        self._choose_layout(config, found)
        return found

    def _choose_layout(self, config: Any, specs: Mapping[str, Any]) -> None:
        """Newer releases choose the order of a block's dimensions before they plan blocks."""
        layouts: Any = importlib.import_module("vllm.v1.attention.backends.utils")
        resolve = getattr(layouts, "resolve_kv_cache_layout", None)
        if resolve is None or not specs:
            return
        backends: Any = importlib.import_module("vllm.v1.worker.worker_base")
        used = backends.get_current_attn_backends(config)
        names = [layout.name for layout in layouts.get_supported_kv_cache_layouts(used)]
        resolve(config, [names], list(specs.values()))

    def plan(self, config: Any, specs: Mapping[str, Any], available: int) -> Any:
        """The cache for so many bytes.

        Raises:
            ValueError: they are too few for one request.
        """
        plan = self.planning.get_kv_cache_configs
        arguments = [config, [dict(specs)], [available]]
        if "global_kv_cache_groups" in inspect.signature(plan).parameters:
            arguments.append(self.planning.get_global_kv_cache_groups(config, [dict(specs)]))
        return plan(*arguments)[0]

    def concurrency(self, config: Any, plan: Any) -> float:
        """How many requests of the longest context a cache has room for."""
        return float(self.utilities.get_max_concurrency_for_kv_cache_config(config, plan))

    def report(self, config: Any, plan: Any) -> None:
        """Log the size of the cache, where planning itself does not."""
        report = getattr(self.utilities, "update_kv_cache_capacity", None)
        if report is not None:
            report(config, self.utilities.generate_scheduler_kv_cache_config([plan]))

    def requested(self, config: Any, memory: Mapping[str, int]) -> int:
        """The share of the device's memory that the server takes.

        Raises:
            ValueError: less is free.
        """
        snapshot = types.SimpleNamespace(
            total_memory=memory["total"], free_memory=memory["free"], device_="cuda:0"
        )
        return int(self.worker.request_memory(snapshot, config.cache_config))


@contextlib.contextmanager
def context(config: Any, tokens: int) -> Iterator[None]:
    """Another longest context for a while."""
    before = config.model_config.max_model_len
    config.model_config.max_model_len = tokens
    try:
        yield
    finally:
        config.model_config.max_model_len = before


def longest(release: Release, config: Any, plan: Any, requests: int) -> int:
    """The longest context, up to the configured one, of which a cache holds so many; 0 if none."""

    def fits(tokens: int) -> bool:
        with context(config, tokens):
            return release.concurrency(config, plan) >= requests

    low, high = 0, int(config.model_config.max_model_len)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def overhead(config: Any, memory: Mapping[str, int]) -> int:
    """The bytes beside weights and caches, which grow with the tokens of a batch."""
    tokens = int(config.scheduler_config.max_num_batched_tokens)
    parallel = config.parallel_config
    several = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
    between = memory["overhead_between_ranks"] if several else 0
    return memory["overhead"] + tokens * memory["overhead_per_token"] + between


def groups_of(plan: Any) -> list[Json]:
    """The groups of layers that share blocks."""
    return [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "layers": len(group.layer_names),
            "block_tokens": int(getattr(group.kv_cache_spec, "block_size", 0) or 0),
            "block_bytes": int(group.kv_cache_spec.page_size_bytes),
        }
        for group in plan.kv_cache_groups
    ]


def planned(release: Release, config: Any, weights: int, memory: Json, into: Json) -> None:
    """Fill in what the release says, in the order in which its server says it.

    Raises:
        ValueError: the release refuses for want of memory.
    """
    pinned = getattr(config.cache_config, "kv_cache_memory_bytes", None)
    share = int(memory["total"] * config.cache_config.gpu_memory_utilization)
    left = share - weights - into["overhead_bytes"]
    into["available_bytes"] = int(pinned or left)
    into["requested_bytes"] = release.requested(config, memory)
    if not into["specs"]:
        return
    plan = release.plan(config, into["specs"], into["available_bytes"])
    release.report(config, plan)
    into["blocks"] = int(plan.num_blocks)
    into["concurrency"] = release.concurrency(config, plan)


def tried(release: Release, config: Any, memory: Json, into: Json) -> None:
    """Fill in what follows for other amounts of memory and other contexts."""
    specs = into["specs"]
    ample = release.plan(config, specs, PLENTY)
    into["groups"] = groups_of(ample)
    into["request_bytes"] = int(PLENTY / release.concurrency(config, ample))
    with context(config, 1), contextlib.suppress(ValueError):  # not even one token
        small = release.plan(config, specs, max(into["available_bytes"], 0))
        numbers = memory["requests"]
        with context(config, into["context"]):
            found = [longest(release, config, small, number) for number in numbers]
        into["longest"] = {str(n): tokens for n, tokens in zip(numbers, found, strict=True)}


def memory_of(config: Any, weights: int, memory: Json, log: Sequence[list[str]]) -> Json:
    """What the release says about the memory of a model with these bytes of weights.

    ``log`` has the lists that the release's messages go to; what trials log is removed.
    """
    into = {**MEMORY, "longest": {}}
    current = importlib.import_module("vllm.config").set_current_vllm_config
    with current(config):
        release = Release()
        into["specs"] = release.specs(config)
        into["block_tokens"] = int(config.cache_config.block_size or 0)
        into["overhead_bytes"] = overhead(config, memory)
        try:
            planned(release, config, weights, memory, into)
        except ValueError as error:
            into["refusal"] = str(error)
        into["context"] = int(config.model_config.max_model_len)
        own = [len(lines) for lines in log]
        if into["specs"]:
            tried(release, config, memory, into)
        for lines, length in zip(log, own, strict=True):  # a server makes no trials
            del lines[length:]
    del into["specs"]
    return into
