"""Umbra: asynchronous RL post-training of language models without Ray."""

__version__ = "0.1.0"

__all__ = ["__version__"]
