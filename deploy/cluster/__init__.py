"""Plans a run over several machines, and renders the files that start it there."""
