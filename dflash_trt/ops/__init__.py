"""The two custom operators, domain `dflash_trt`, version 1: each with an eager reference, a torch custom op and an
ONNX function body that must agree."""

DOMAIN = "dflash_trt"
VERSION = 1
OPSET = 24
