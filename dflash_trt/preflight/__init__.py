"""What is checked of a graph before TensorRT's builder sees it: one module per kind of rule, and the report of them."""
