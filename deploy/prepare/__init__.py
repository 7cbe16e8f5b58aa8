"""Loading a run file, and what is tried before anything starts."""
