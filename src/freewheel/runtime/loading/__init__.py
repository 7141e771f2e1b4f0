"""Batches: leases of samples behind torch's DataLoader."""
