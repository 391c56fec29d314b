"""Faults on demand: what a backend does on its worst days, scripted and seeded, so that a failure repeats.

`rules` are the values (what goes wrong, for whom, when) and `director` decides by them; both are pure. `layer` stands
in front of the control plane and the sandboxes and does it, `journal` writes down every request and what hit it, `api`
lets a test change the rules of a running server. A server that was not started with chaos has none of this in it.
"""
