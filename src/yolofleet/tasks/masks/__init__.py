"""Instance masks of objects, with their boxes."""
