"""What the losses mean: float64 NumPy, one short file a loss."""
