"""Predict the speed, the time and the cost of a training on a fleet: ``yolofleet plan``. No torch."""
