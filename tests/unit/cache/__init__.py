"""Unit tests of ``builder/cache``."""
