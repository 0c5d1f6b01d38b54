"""Tests of ``builder/common/machinecode``."""
