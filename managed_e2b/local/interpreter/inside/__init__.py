"""The code interpreter's service, as it runs inside a sandbox.

The package is copied into the template's layer, under another name, and runs there with what is in that layer: the
standard library, tornado, jupyter_client. It imports nothing of managed_e2b.
"""
