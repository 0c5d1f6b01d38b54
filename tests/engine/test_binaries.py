"""`spark-build verify --level binaries` on an image: every module in it, through the engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .support import Cli

QUANT, STABLE = "NVFP4 quantisation of activations", "vllm/_C_stable_libtorch.abi3.so"
ATTENTION, HOST = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/cumem_allocator.abi3.so"


def test_every_module_of_an_image_is_read(cli: Cli, base_image: str) -> None:
    words = ("verify", base_image, "--layers", "b12x-full", "--level", "binaries", "--json")
    checks = {check["name"]: check for check in cli(*words).ok().json["checks"]}
    assert {check["status"] for check in checks.values()} == {"pass"}
    assert "native (sm_120f)" in checks[QUANT]["seen"]
    assert checks[QUANT]["where"] == f"{STABLE} of {base_image}"
    assert checks[STABLE]["expected"] == "SM121 runs kernels of it"
    assert checks[HOST]["seen"] == "no device code"
    seen = checks[ATTENTION]["seen"]
    assert re.search(r"runs 0 natively, \d{4} compiled by the driver from PTX, 0 not at all", seen)
