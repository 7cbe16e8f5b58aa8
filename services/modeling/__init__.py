"""What trainer, scorers and generators share: models, logprobs, chat templates, environments."""
