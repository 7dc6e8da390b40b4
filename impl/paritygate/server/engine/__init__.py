"""The one thread that computes: sampling, scoring, losses, gradients and optimizer steps in bounded pieces."""
