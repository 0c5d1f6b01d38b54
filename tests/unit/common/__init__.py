"""Unit tests of ``builder/common``."""
