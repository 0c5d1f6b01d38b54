"""The local cache: list its contents, and free space."""
