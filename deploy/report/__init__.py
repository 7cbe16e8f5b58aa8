"""Records of a run for people: its timeline as a trace file, and a report as one page."""
