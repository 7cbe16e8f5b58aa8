"""The agent endpoint: programs with a loop of their own ask for turns in OpenAI's protocol."""
