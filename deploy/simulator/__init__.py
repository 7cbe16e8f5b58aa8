"""What a run would do on a cluster: the production broker and push protocol in simulated time."""
