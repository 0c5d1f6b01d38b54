"""Tests of ``builder/verify``."""
