"""The comparisons of the correctness preflight: recorded numbers and the live cookbook."""
