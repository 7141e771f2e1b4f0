"""Starting workers: the launcher of one host, its processes, keys."""
