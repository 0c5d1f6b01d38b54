"""The check of the environment, started on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.unit.probes.test_device_environment import environment


def test_no_gpu_is_reported() -> None:
    """This asks the real driver library of this machine, which has none."""
    checks, trouble = environment.look()
    if not trouble:
        pytest.skip("this machine has an NVIDIA driver")
    assert checks == []
    assert "libcuda.so.1" in trouble
