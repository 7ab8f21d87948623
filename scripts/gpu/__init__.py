"""The parts of `scripts/gpu_check.py`: what one command measures and checks on a machine with a GPU."""
