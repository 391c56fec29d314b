"""`python -m managed_e2b.cli`: the command, where its script is not on the PATH."""

from managed_e2b.cli import main

main()
