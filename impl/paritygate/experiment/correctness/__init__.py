"""The comparisons of the correctness preflight: recorded numbers, the live cookbook, a real model."""
