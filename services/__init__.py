"""The processes that make up a run, one folder each."""
