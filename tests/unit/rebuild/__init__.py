"""Unit tests of ``builder/rebuild``."""
