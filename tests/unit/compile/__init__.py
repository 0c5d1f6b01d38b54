"""Unit tests of ``builder/compile``."""
