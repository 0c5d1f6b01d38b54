"""Unit tests of ``builder/pipeline``."""
