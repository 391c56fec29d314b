"""Template `code-interpreter-v1`: what serves the port 49999 of its sandboxes, and the layer that brings it there."""
