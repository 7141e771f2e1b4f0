"""Training a built-in task with real processes: what `freewheel train` and `freewheel compare` do."""
