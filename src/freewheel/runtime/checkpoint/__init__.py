"""Checkpoints: taken between batches, written beside training, resumed together."""
