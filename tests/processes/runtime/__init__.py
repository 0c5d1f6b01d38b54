"""Tests of ``builder/runtime``."""
