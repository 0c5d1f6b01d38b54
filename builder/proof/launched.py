"""A kernel that level ``numbers`` runs; and those of the package ``b12x``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.proof.kernels import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

#: vLLM's own layers in front of a kernel.
LAYER, MOE_LAYER = "vllm-linear", "vllm-moe"


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A kernel whose numbers are to be checked: the calls that launch it."""

    name: str
    #: the kind of layer that it serves
    serves: str
    request: Mapping[str, Any]
    #: what the line that a profile expects has in it, in small letters
    line: str = "b12x"


def _of_package(name: str, kind: str, **request: Any) -> Launched:
    return Launched(name=f"package b12x, {name}", serves=PACKAGE, request={"kind": kind, **request})


#: The settings with which vLLM takes the kernels of the package ``b12x``.
PACKAGE_CHOSEN = {"linear_backend": PACKAGE, "moe_backend": PACKAGE}
#: Kernels of the package ``b12x``, which has a tile for each range of rows and columns.
OF_PACKAGE = (
    _of_package(
        "NVFP4 GEMM",
        "package-dense",
        # tiles of 64x64, 128x128 and, swapped, 32x64
        shapes=[[104, 200, 512], [136, 128, 1152], [1, 128, 4096]],
    ),
    _of_package("NVFP4 GEMM, tile 128x64", "package-dense", shapes=[[104, 264, 384]], sms=8),
    _of_package("NVFP4 GEMM, 1 token", "package-dense", shapes=[[1, 136, 128], [1, 1160, 384]]),
    _of_package(
        "NVFP4 GEMM, several tiles a block",
        "package-dense",
        shapes=[[200, 256, 512], [200, 256, 384]],
        sms=2,
    ),
    _of_package(
        "NVFP4 GEMM, special values", "package-dense", shapes=[[64, 64, 256]], inputs="degenerate"
    ),
    _of_package("vLLM's NVFP4 linear layer", LAYER, shapes=[[64, 200, 384]], **PACKAGE_CHOSEN),
    _of_package(
        "W4A16 GEMM",
        "package-dense-a16",
        # 16 rows, 32, 64, none of them full
        shapes=[[9, 200, 640], [24, 136, 320], [40, 200, 320]],
    ),
    _of_package(
        "W4A16 GEMM, several tiles a block",
        "package-dense-a16",
        shapes=[[9, 384, 256], [40, 384, 320]],
        sms=1,
    ),
    _of_package(
        "W4A16 GEMM, special values",
        "package-dense-a16",
        shapes=[[16, 64, 256]],
        inputs="degenerate",
    ),
    _of_package(
        "vLLM's W4A16 linear layer",
        LAYER,
        layer="w4a16-linear",
        shapes=[[9, 200, 384]],
        **PACKAGE_CHOSEN,
    ),
    _of_package(
        "vLLM's NVFP4 experts",
        MOE_LAYER,
        tokens=[1, 24],
        experts=4,
        hidden=512,
        intermediate=128,
        **PACKAGE_CHOSEN,
    ),
    _of_package(
        "vLLM's W4A16 experts",
        MOE_LAYER,
        layer="w4a16-moe",
        finer=True,
        tokens=[1, 24],
        experts=4,
        hidden=256,
        intermediate=128,
        **PACKAGE_CHOSEN,
    ),
)
