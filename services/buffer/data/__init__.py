"""Prompts: where they come from, and in which order."""
