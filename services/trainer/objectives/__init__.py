"""Policy losses, composed of pieces; `objective.py` puts them together."""
