"""The custom operators, domain `dflash_trt`, version 1.

Graphs call two of them, KVInjection and StaircaseAttention. Each has faces that must agree: an eager torch reference
and a torch op (`<name>.py`), an ONNX schema and function bodies (`<name>_onnx.py`), a kernel and a plugin. No graph
calls those of `accepted_path.py`: what a decode step does on the device between its passes. Of the modules here only
those in `_onnx` need more than torch.
"""

DOMAIN = "dflash_trt"
VERSION = 1
OPSET = 24
