"""From an entry of the index to a tensor."""
