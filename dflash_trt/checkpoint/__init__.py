"""Reading Hugging Face checkpoint folders: specs, lazily read tensors, strict validation."""
