"""Tests of ``builder/cache``."""
