"""Tests that compile or execute kernels of released wheels."""
