"""The package index: which wheels a release has, and reading files out of them."""
