"""The rules: staleness, admission, which groups make a batch, what is cancelled."""
