"""Starting a run: the local supervisor, the planner and the run files."""
