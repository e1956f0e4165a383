"""Synthetic tasks that show what a memory can hold."""
