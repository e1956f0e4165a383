"""Memories of other kinds: attention caches, diagonal recurrences, slots, least squares, scalar cells."""
