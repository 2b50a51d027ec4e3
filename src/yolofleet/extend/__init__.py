"""A user's own code: callbacks, models, losses and data sets."""
