"""Exit codes that mean something to the caller of a command."""

INTERRUPTED = 130
"""After a signal, also where everything was saved: what comes after the command must not run as if it had finished."""
