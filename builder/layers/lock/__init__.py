"""The lock file of a project: pinned inputs, and recorded facts about base images."""
