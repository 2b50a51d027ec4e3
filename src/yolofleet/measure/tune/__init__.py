"""Search better recipe values with many short trainings."""
