"""Measure drafts against plain decoding: rows, times, figures, reports, plots."""
