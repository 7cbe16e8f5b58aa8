"""The folder of a run: its paths, rollouts and texts for people."""
