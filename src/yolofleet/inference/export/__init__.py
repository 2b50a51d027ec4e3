"""Export trained networks to files of other runtimes, verify the files, and run them."""
