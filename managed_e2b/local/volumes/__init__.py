"""Volumes: files that sandboxes share, that outlive them, and that the content API of volumes reads and writes."""
