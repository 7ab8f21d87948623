"""The torch modules that are traced: parameter names are those of the Hugging Face checkpoints."""
