"""What ``accumulate.check`` and ``python -m accumulate check`` run; imported only when one of them is called."""
