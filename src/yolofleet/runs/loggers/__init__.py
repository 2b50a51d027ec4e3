"""Stores outside of the files of a run: TensorBoard, W&B, MLflow and others, a process for each."""
