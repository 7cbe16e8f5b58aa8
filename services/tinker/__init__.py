"""A server of the Tinker API: the learner and the torch engine behind the routes of its SDK."""
