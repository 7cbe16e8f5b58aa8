"""The version of this distribution, which everything may import."""

__version__ = "0.1.0"
