"""Tests of ``builder/engines``."""
