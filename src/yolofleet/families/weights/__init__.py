"""Trained weights as values, and the files that store them: ours and those of other projects."""
