"""The HTML report: one file, nothing fetched."""
