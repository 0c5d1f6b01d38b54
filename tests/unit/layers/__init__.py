"""Unit tests of ``builder/layers``."""
