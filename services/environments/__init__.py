"""Environments, tools and rewards, and the processes they run in."""
