"""Engines turn a plan into an image.  Both give the same files, byte for byte."""
