"""Unit tests of ``builder/pypi``."""
