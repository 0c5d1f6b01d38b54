"""Unit tests of ``builder/bases``."""
