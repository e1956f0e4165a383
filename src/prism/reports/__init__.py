"""Reports on results: HTML pages, charts, pictures and JSON files."""
