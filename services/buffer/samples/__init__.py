"""Samples, their groups, what was sent for them, and the ledger over them."""
