"""One process of a run: its command, signals, threads, logs, metrics and files."""
