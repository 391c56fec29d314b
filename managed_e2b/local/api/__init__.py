"""The control plane: E2B's REST API for sandboxes and templates."""
