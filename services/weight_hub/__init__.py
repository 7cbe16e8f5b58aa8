"""Versions of the weights and the pushes that carry them to the generators."""
