"""Unit tests of ``builder/ptx``."""
