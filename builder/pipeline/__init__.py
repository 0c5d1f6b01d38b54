"""The story of a build: identify, select, plan, build, verify; and of a lock, told the same way."""
