"""What an engine is, the torch engine, and how the configured one is opened."""
