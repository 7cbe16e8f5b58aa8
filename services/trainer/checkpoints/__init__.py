"""Checkpoints of a trainer: what is in them, how they are written, and how they are read."""
