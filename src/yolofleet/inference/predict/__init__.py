"""Images to boxes: ``yolofleet predict``."""
