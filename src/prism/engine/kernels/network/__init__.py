"""Memories that are networks."""
