"""paritygate: prove a post-training loss against its definition, then spend the GPU."""

__version__ = "0.1.0"
