"""The durable store of a run: log, segments, snapshots, repair."""
