"""Does this fleet do what it should? Checks that a person runs."""
