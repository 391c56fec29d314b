"""Builds of templates: images from registries, steps run in sandboxes, their cache."""
