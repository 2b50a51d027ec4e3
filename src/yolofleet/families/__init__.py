"""Model families, a folder each: networks, loss, weights files of other projects, recipes."""
