"""Tests of ``builder/distribute``."""
