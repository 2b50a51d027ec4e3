"""Settings of all verbs: read, merged with their sources, checked. No torch."""
