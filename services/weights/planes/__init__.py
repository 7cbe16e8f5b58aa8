"""The ways in which weights travel from the hub to a receiver, one module for each."""
