"""JSON documents that several packages share: a plan, and pull requests as they are pinned."""
