"""Reads the log of a model server: what it selected, what killed it, what to do."""
