"""What our losses mean: float64 NumPy."""
