"""Tests of ``builder/applier``."""
