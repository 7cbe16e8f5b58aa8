"""Models, logprobs, chat templates and parsers, shared by trainer, scorers and generators."""
