"""One adapter per wrapper; each is imported only when a model holds its wrapper."""
