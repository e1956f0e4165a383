"""Memories outside the normal form: attention caches, diagonal recurrences, slots, least squares, scalar cells."""
