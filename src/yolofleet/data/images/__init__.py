"""Size and pixels of an image file. Nothing else decodes images."""
