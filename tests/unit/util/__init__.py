"""Unit tests of ``builder/util``."""
