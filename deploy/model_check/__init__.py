"""`umbra check-model`: what Umbra computes with a model, compared with Transformers."""
