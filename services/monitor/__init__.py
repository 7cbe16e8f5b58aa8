"""Read-only views of a run that never change its behaviour."""
