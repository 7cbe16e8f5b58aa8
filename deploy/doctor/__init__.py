"""`umbra doctor`: what is in the way of a run on this machine, or between the nodes of a plan."""
