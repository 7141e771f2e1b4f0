"""The doctor: facts of a machine, how they are judged, how fast links are."""
