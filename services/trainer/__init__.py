"""The policy, its optimizer, the losses and the checkpoints."""
