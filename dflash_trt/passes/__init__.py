"""ONNX -> ONNX passes, one per file: each says what it requires, what it ensures, and whether it changed anything."""
