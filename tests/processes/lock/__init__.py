"""Tests of ``builder/lock``."""
