"""Copies of a rank's checkpoint on other ranks' disks."""
