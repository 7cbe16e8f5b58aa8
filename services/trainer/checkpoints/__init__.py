"""Checkpoints of a trainer: their content, and code that writes and reads them."""
