"""A worker of one scoring stage: rewards, reference logprobs or proximal logprobs."""
