"""Unit tests of ``builder/publishing``."""
