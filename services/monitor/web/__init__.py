"""The page of a run, for `umbra monitor --web` and for report.html, and what serves it."""

WEB = "umbra.services.monitor.web"
"""This package, which has the page."""
