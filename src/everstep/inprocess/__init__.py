"""Inprocess."""
