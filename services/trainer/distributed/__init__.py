"""The ranks of a trainer: how they start, meet, share the model and act together."""
