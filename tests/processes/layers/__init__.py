"""Tests of ``builder/layers``."""
