"""The task of boxes: suppression, COCO's figures, kinds of errors, pictures and files."""
