"""Real processes and wall-clock time: attach, launch, keys."""
