"""One process of a run: join the others, build the parts, train or validate."""
