"""The ranks of a trainer: how they meet, wait for each other, share the model and act together."""
