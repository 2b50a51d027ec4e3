"""States of a run, and weights files of this and other projects."""
