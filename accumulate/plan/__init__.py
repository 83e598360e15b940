"""What ``python -m accumulate plan`` computes: bytes, time and memory of windows on a cluster that is not there yet."""
