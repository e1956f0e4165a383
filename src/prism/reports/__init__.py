"""Results for people: HTML pages, plots and JSON files."""
