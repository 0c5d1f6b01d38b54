"""Tests of ``builder/images/engines``."""
