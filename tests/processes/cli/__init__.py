"""Tests of ``builder/cli``."""
