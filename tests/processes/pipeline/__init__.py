"""Tests of ``builder/pipeline``."""
