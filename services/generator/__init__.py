"""Rollouts: an inference engine, environments and rewards."""
