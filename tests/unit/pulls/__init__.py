"""Unit tests of ``builder/pulls``."""
