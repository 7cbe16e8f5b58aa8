"""Runs the agents of a run on a machine of their own."""
