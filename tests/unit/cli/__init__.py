"""Unit tests of ``builder/cli``."""
