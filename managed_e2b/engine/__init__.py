"""The lifecycle of sandboxes, written once. Start reading at `acquire`; it ends in `release`."""
