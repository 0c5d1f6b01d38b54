"""JSON documents that several packages share: plans, and pinned pull requests."""
