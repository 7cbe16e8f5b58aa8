"""Weights from the trainer to an engine: layout, memory, pushes, and the readers of planes."""
