"""The cache on this machine: what is in it, and how it is made smaller."""
