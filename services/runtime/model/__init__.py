"""What is known of a model before it is loaded."""
