"""The version of this distribution, which everything may import."""

__version__ = "0.2.0"
