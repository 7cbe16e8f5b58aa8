"""Samples, their groups, their trajectories and scores, and the ledger over them."""
