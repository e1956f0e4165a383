"""The operations of a layer around its memory."""
