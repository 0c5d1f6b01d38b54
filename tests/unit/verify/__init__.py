"""Unit tests of ``builder/verify``."""
