"""The bridge to TensorRT-LLM: its PyTorch backend (1.3 and later) and its engine flow (1.2.1 and earlier)."""
