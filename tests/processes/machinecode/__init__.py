"""Tests of ``builder/machinecode``."""
