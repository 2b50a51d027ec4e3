"""The live page of runs: their rows, and the server."""
