"""`umbra estimate`: how much memory each process, GPU and host of a run needs, before it starts."""
