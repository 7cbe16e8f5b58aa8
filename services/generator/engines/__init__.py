"""The engine interface, the torch engine, and a function that opens the configured one."""
