"""Tests of ``builder/publishing/distribute``."""
