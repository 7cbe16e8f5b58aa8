"""The wire's two ends: clients, servers, keys, and a process's place in the run."""
