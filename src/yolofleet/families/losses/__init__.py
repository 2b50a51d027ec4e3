"""The interface of a loss, and the assignment of labels to cells."""
