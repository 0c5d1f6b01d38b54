"""Unit tests of ``builder/common/pypi``."""
