"""Who is in a run: where workers meet, which life of a worker counts, who begins again."""
