"""From traced modules to the portable ONNX graph: calls of the custom operators plus their function bodies."""
