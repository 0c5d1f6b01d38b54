"""Fast tests: no network, no engine, no GPU."""
