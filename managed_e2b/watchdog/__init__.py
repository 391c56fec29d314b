"""The companion process of a program that uses sandboxes: when that dies without a goodbye, it ends what it left.

One process serves all lifecycles of a program, as `multiprocessing`'s resource tracker does. `companion` is the
program's side, `__main__` the process, `estate` what it does at a death. The two are joined by a socket, as JSON
lines, for nothing of it may be seen in arguments, in the environment or in a file (it holds the key):

    {"hello": {"path": […], "environment": {…}}}    first: where to import from, and what the network's tools read
    {"register": {"owner": …, "ledger": …, "account": …, "lease": …, "endpoint": {…}}}
    {"goodbye": OWNER}                              it left nothing
    {"hand_over": OWNER}                            it is closed, and could not end everything: go on for it

This file and `__main__` import nothing but the standard library: the process is small while it waits.
"""
