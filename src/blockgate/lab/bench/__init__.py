"""Measurements side by side: what `blockgate bench` prints."""
