"""Goodput."""
