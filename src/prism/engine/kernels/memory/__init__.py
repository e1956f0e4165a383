"""The linear memory in chunks: with a decay per head, and with one per key channel (`channel_…`)."""
