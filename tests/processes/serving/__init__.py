"""Tests of ``builder/serving``."""
