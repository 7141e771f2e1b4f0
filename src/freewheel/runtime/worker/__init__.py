"""A worker: what `attach` gives, its two threads, the replica between them, its end."""
