"""The E2B-compatible server that needs no account and no network, and the Linux sandboxes behind it.

`gateway` sends each request to the control plane (`api`), to a sandbox's `envd`, or to a port of it; `sandboxes` is
the truth about which sandboxes exist; `runtime` makes them. `server` puts these together, `background` runs that in a
process of its own. Nothing here knows the manager: they meet over HTTP.
"""
