"""polars, or a sentence that says how to get it. Only what reads a raw log imports this."""

try:
    import polars as pl
except ImportError as error:
    raise ImportError("reading a log of events needs polars: pip install 'prism-sequence[rec]'") from error

__all__ = ["pl"]
