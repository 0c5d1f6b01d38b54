"""Layer ``vllm-marlin-scales``: the same factor as the release's own, in less memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .sandboxed import release_of

if TYPE_CHECKING:
    from .support import Planner

FILE = "vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py"


@pytest.mark.parametrize("version", ["0.20.1", "0.28.0", "0.33.0"])
def test_the_factor_is_the_same_and_takes_no_copy(version: str, planned: Planner) -> None:
    """On a CPU, by the release's own function, without and with the layer."""
    made = []
    for layers in ("marlin-env", "vllm-marlin-scales"):
        release = release_of(planned(f"pypi:vllm=={version}", layers))
        (answer,) = release.run("scale_factor.py", f"{release.paths[0]}/{FILE}")
        made.append(answer)
    before, after = made
    assert before["factors"] == after["factors"]
    assert len(set(before["factors"].values())) > 5, "factors differ with the scales"
    assert before["peak"] > 10, "copies in FP32, a mask and the places of all experts, by their bytes"
    assert after["peak"] < 2
