"""Runs started and watched from Python: `umbra.train`, `umbra.attach`, `umbra.Run`."""
