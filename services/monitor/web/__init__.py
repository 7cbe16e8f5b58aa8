"""The monitor over HTTP: a page to look at and figures for Prometheus; read-only."""
