"""Unit tests of ``builder/layers/pulls``."""
