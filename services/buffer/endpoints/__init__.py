"""Requests to the broker, by kind of client."""
