"""These tests see the same empty world as the unit tests: see ``tests/unit/conftest.py``."""

from tests.unit.conftest import isolated, spark_build

__all__ = ["isolated", "spark_build"]
