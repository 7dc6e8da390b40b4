"""What the losses mean: float64 NumPy and mpmath, one short file a loss."""
