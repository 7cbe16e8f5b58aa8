"""Weights from the trainer to an engine: layout, memory, and both of their ends of a push."""
