"""The steps of a build: identify, select, plan, build, verify; and the same for a lock."""
