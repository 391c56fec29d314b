"""What a sandbox may reach outside: the rules (`policy`), and the relays that are its only way out (`ways`)."""
