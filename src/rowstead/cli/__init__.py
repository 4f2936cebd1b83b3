"""The command line. Each command imports what it needs, so that `rowstead --help` starts fast."""
