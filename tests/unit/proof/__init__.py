"""Unit tests of ``builder/proof``."""
