"""PP-YOLOE."""
