"""Make plans: judge each layer on a base, and pin its inputs."""
