"""Rows of prompts, wherever they come from."""
