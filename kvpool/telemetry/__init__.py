"""Spans, their export, and histograms: values that any part of kvpool may record."""
