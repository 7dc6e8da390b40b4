"""What holds an implementation to its definition: the comparator of every obligation and of every preflight."""
