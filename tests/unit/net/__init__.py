"""Unit tests of ``builder/net``."""
