"""`umbra up`: the processes of a run on this machine, supervised and shown."""
