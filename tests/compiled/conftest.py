"""These tests see the same empty world as the unit tests: see ``tests/unit/conftest.py``."""

from tests.unit.conftest import homes, isolated, spark_build

__all__ = ["homes", "isolated", "spark_build"]
