"""Rebuild an image from its own metadata, and compare the result byte for byte."""
