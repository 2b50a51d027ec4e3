"""Images to what is in them: ``yolofleet predict``."""
