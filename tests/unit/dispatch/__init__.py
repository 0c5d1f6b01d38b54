"""Unit tests of ``builder/dispatch``."""
