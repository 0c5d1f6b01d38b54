"""Tests of ``builder/layers/pulls``."""
