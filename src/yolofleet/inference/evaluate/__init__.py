"""Validation on all ranks, COCO and VOC metrics, and kinds of errors."""
