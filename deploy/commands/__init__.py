"""Commands around runs: init, demo, runs, chat, keys."""
