"""HTTP: what agents ask for completions, the monitor's page and its figures are served by it."""
