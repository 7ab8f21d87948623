"""Serving with Triton Inference Server: the model repository, and the models inside it."""
