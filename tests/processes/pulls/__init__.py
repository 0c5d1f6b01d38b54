"""Tests of ``builder/pulls``."""
