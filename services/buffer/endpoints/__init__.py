"""What each kind of client may ask of the broker."""
