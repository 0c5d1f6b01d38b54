"""Unit tests of ``builder/runtime``."""
