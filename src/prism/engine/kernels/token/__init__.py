"""One token: of a memory alone, and of a whole layer."""
