"""The broker: prompts, leases, trajectories, staleness policy and membership."""
