"""The evidence page in a real browser."""
