"""The engines of a GPU, by Triton; imported only where there is one."""
