"""The package index: find the wheels of a release, and read files from them."""
