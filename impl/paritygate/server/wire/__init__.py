"""The wire format of the tinker SDK: request bodies in, checked values out, and results back."""
