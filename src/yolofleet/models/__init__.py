"""Networks of the families, from a model file to modules of torch."""
