"""Loading a run file, and checks before anything starts."""
