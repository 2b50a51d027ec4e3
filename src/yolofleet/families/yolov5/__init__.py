"""YOLOv5, and YOLOv3 in its form."""
